"""The one clip: measure over a scope, respond to a threshold, apply.

Both layers stand on `Clip`. `functional` gives it thresholds; `transforms` asks a
rule for them between `measure` and `apply`. Norms, thresholds and coefficients are
`Batched` here, one entry a block, and trees of the scope's structure outside.
`ScalingClip` multiplies; `_elements.ElementClip` moves single elements to a bound.
"""

import abc
import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optclip._arrays import (
    _axis_names,
    _leaves,
    _numerics,
    _sparse,
    _validate,
    _xla,
)
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName, Leaf, Mask, Number, PyTree
from optclip._clip import _nonfinite, _scale
from optclip._clip._layout import Layout, layout_of
from optclip.norms import Block, Norm, _measure
from optclip.norms._norm import INF
from optclip.norms._roots import LEAST
from optclip.responses import Response
from optclip.responses._resolve import at_step, compares, is_ours
from optclip.scopes._scope import Scope

# Half the width of the band that strict clipping keeps clear, 1,024 roundings of 2**-24
# of the norm. A sum loses at most, in such roundings:
#   186  in a leaf: XLA on CPU adds fewer than 4,096 elements in a tree of sums of 32,
#        31 roundings a level, and six levels hold 2**30 elements; more elements it adds
#        in library kernels, where no probed path had more than 46 additions,
#     5  in merging 32 small leaves by pairs,
#   252  in rows of 64 leaves, two levels of 63 for the merged and two for the large,
#     5  in the square, the root, the quotient and the product.
# A norm of order p loses 1 / p of that: 224 for p = 2, 448 for p = 1, 896 for p = 0.5;
# smaller p are not covered. For p = 2 squares flushed to zero add 512, see below.
# Meshes of CPUs and axes that are not adjacent are added in other orders: not covered.
_BAND = {"float32": 2.0**-14, "float64": 2.0**-40}

# A smaller threshold counts as 0 in strict clipping: at 2**-36, the flushed squares of
# 2**40 elements, each below 2**-126, are 2**-14 of the squared norm and half of that of
# the norm.
_LEAST_STRICT = {"float32": 2.0**-36, "float64": 2.0**-450}


# What a threshold is to a clip, fitted to its norms, and what it multiplied by.
Fitted = TypeVar("Fitted")
Coefficients = TypeVar("Coefficients")


@dataclasses.dataclass(frozen=True)
class Clip(abc.ABC, Generic[Fitted, Coefficients]):
    """A clip short of its threshold: what is measured, and what then happens.

    Its two kinds say by `fit` what a threshold is to them, by `apply` what they do with
    it, and by `recorded` what the record says of that.
    """

    scope: Scope
    norm: Norm
    response: Response
    eps: Number = 0.0
    strict: bool = False
    nonfinite: str = "propagate"
    mask: Mask | None = None
    norm_mask: Mask | None = None
    clip_mask: Mask | None = None
    axis_name: AxisName | None = None

    @abc.abstractmethod
    def fit(self, name: str, values: list[Any], measured: Batched) -> Fitted:
        """The threshold of each block, at least 0, checked to fit its norm."""

    @abc.abstractmethod
    def per_norm(self, limits: Fitted, measured: Batched) -> Batched:
        """The thresholds, one for each norm."""

    @abc.abstractmethod
    def apply(
        self, layout: Layout, measured: Batched, limits: Fitted
    ) -> tuple[PyTree, Coefficients]:
        """The clipped tree, and the coefficient of each block."""

    @abc.abstractmethod
    def recorded(
        self, measured: Batched, limits: Fitted, coefficients: Coefficients
    ) -> tuple[Batched, Batched]:
        """The threshold and the coefficient of each norm, for the record."""

    def __post_init__(self) -> None:
        _validate.choice("nonfinite", self.nonfinite, _nonfinite.POLICIES)
        _validate.flag("strict", self.strict)
        _validate.plain("eps", self.eps)
        _axis_names.check(self.axis_name)

    def at(self, step: jax.Array) -> "Clip[Fitted, Coefficients]":
        """The same with the response as it is for a step."""
        now = at_step(self.response, step)
        return self if now is self.response else dataclasses.replace(self, response=now)

    def at_init(self) -> "Clip[Fitted, Coefficients]":
        """The same, with no mapped axes declared unless their types are known here."""
        if _axis_names.is_typed_here():
            return self
        return dataclasses.replace(self, axis_name=())

    def layout(self, tree: PyTree) -> Layout:
        """Which leaves are measured, which are scaled, and by whose norm."""
        masks = self.mask, self.norm_mask, self.clip_mask
        return layout_of(self.scope, tree, *masks, self.axis_name)

    def measure(
        self, layout: Layout, *, guarded: bool = True, flushed: bool = True
    ) -> Batched:
        """The norm of each block that is shown."""
        return _measure.measure_batched(
            self.shown(layout), self.norm, guarded=guarded, flushed=flushed
        )

    def shown(self, layout: Layout) -> list[Block]:
        """The blocks, short of the entries that the policy drops."""
        if self.nonfinite != "drop":
            return layout.blocks
        return [_nonfinite.each(_nonfinite.dropped, block) for block in layout.blocks]

    def bad(self, layout: Layout, measured: Batched) -> Batched:
        """Whether each block has an entry, or a norm, that is not finite."""
        bad = measured.map(lambda norm: ~jnp.isfinite(norm))
        if self.nonfinite != "drop":
            return bad
        flags = [_nonfinite.each(_nonfinite.flags, block) for block in layout.blocks]
        found = _measure.measure_batched(flags, INF).map(lambda norm: norm > 0)
        # Of other arrays, these need not be batched as those are.
        return bad.map(jnp.logical_or, measured.with_entries(found.entries()))

    def check_spans(self, layout: Layout) -> None:
        """Raise unless what slices have in common can be known on all devices."""
        slices = [block for block in layout.blocks if block.axis is not None]
        if any(_leaves.axis_name_of(block.leaves[0]) != () for block in slices):
            _axis_names.check_all_known()

    def respond(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        """What to multiply a block by."""
        if self.nonfinite not in ("zero", "drop"):
            return self._coefficient(norm, threshold)
        bad = ~jnp.isfinite(norm)
        # No NaN on the way, which would trip jax.debug_nans.
        known = jnp.where(bad, jnp.zeros_like(norm), norm)
        found = self._coefficient(known, threshold)
        # A NaN threshold stays NaN: no gradient made it.
        return jnp.where(bad & jnp.isfinite(threshold), jnp.zeros_like(found), found)

    def _coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        if not self.strict:
            return _scale.coefficient_of(self.response, norm, threshold, self.eps)
        band = _BAND[norm.dtype.name]
        upper, lower = threshold * (1 - band), threshold * (1 - 2 * band)
        outer = _scale.coefficient_of(self.response, norm, upper, self.eps)
        inner = _scale.coefficient_of(self.response, norm, lower, self.eps)
        # Below the band nothing is done; in it and above, down to its lower edge.
        return jnp.where((outer == 1) & ~jnp.isnan(inner), outer, inner)

    def coefficients(self, measured: Batched, limits: Batched) -> Batched:
        if is_ours(self.response):
            return measured.map(self.respond, limits)
        # One that is not may want to see numbers, one by one.
        asked = zip(measured.entries(), limits.entries(), strict=True)
        return measured.with_entries([self.respond(m, c) for m, c in asked])

    def keep(self, tree: PyTree, thresholds: PyTree) -> PyTree:
        """The norms that the response would leave of those of a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        measured = Batched(leaves)
        limits = self.fit("threshold", treedef.flatten_up_to(thresholds), measured)
        kept = measured.map(
            jnp.multiply, self.coefficients(measured, self.per_norm(limits, measured))
        )
        return treedef.unflatten(kept.entries(as_slices=True))

    def check(self, layout: Layout) -> None:
        """Raise if the policy says so, or if devices would answer differently."""
        if self.nonfinite == "raise":
            paths = [layout.flat.paths[i] for i in layout.seen]
            _nonfinite.check(paths, [layout.arrays[i] for i in layout.seen])
        if compares(self.response):
            self.check_spans(layout)


class ScalingClip(Clip[Batched, Batched]):
    """Each leaf times the coefficient of its block."""

    def fit(self, name: str, values: list[Any], measured: Batched) -> Batched:
        """The threshold of each block in the dtype and shape of its norm, at least 0.

        Raises:
          ValueError: one does not broadcast to the shape of its norm.
        """
        limits: list[Any] = [None] * len(values)
        for index, m in zip(measured.indices, measured.values, strict=True):
            norm = m if len(index) == 1 else m[0]
            for i in index:
                limits[i] = self._fitted(name, values[i], norm)
        fitted = measured.with_entries([limit for limit, _ in limits])
        if all(is_known for _, is_known in limits):
            return fitted
        return fitted.map(lambda c: _scale.at_least(self._least(c.dtype), c))

    def _fitted(self, name: str, value: Any, norm: jax.Array) -> tuple[jax.Array, bool]:
        """The threshold, and whether it is known not to be too small for a norm."""
        limit = _scale.as_limit(value, norm.dtype)
        is_known = isinstance(limit, np.ndarray)
        if is_known:
            limit = _scale.at_least(self._least(norm.dtype), limit)
        limit = jnp.asarray(limit)
        _axis_names.check_replicated(name, limit, norm)
        _axis_names.check_replicated("eps", jnp.asarray(self.eps), norm)
        _validate.broadcasts(name, limit.shape, norm.shape)
        return _numerics.broadcast_like(limit, norm), is_known

    def _least(self, dtype: DTypeLike) -> float:
        """A smaller threshold counts as 0."""
        return (_LEAST_STRICT if self.strict else LEAST)[jnp.dtype(dtype).name]

    def per_norm(self, limits: Batched, measured: Batched) -> Batched:
        """The thresholds, one for each norm."""
        del measured
        return limits

    def apply(
        self, layout: Layout, measured: Batched, limits: Batched
    ) -> tuple[PyTree, Batched]:
        """The clipped tree, and the coefficient of each block."""
        self.check(layout)
        # Materialized of slices, or XLA on CPU computes them anew for each element.
        found = self.coefficients(measured, limits).map(
            lambda k: _xla.materialized(k) if k.ndim else k
        )
        coefficients, limit_of = found.entries(), limits.entries()
        owned = dict(layout.owned())
        out = {}
        for i, block in owned.items():
            x = _xla.read_again(jnp.asarray(layout.arrays[i]))
            out[i] = self._scaled(layout, i, x, coefficients[block], limit_of[block])
        return layout.rebuild(out), found

    def recorded(
        self, measured: Batched, limits: Batched, coefficients: Batched
    ) -> tuple[Batched, Batched]:
        """The threshold and the coefficient of each norm, for the record."""
        del measured
        return limits, coefficients

    def _scaled(
        self,
        layout: Layout,
        i: int,
        x: jax.Array,
        coefficient: jax.Array,
        limit: jax.Array,
    ) -> Leaf:
        how = {"strict": self.strict, "policy": self.nonfinite}
        original, matrix = layout.leaves[i], layout.matrices.get(i)
        if matrix is None:
            shown = _nonfinite.dropped(x) if self.nonfinite == "drop" else x
            return _scale.settled(x, shown, coefficient, limit, x, **how)
        like = original.data
        apart = self.strict or self.nonfinite == "drop"
        if not coefficient.ndim and not apart:
            data = _scale.settled(like, like, coefficient, limit, like, **how)
            return _sparse.with_data(original, data)
        # Per slice, or rounded, or dropped: that is done to sums of duplicates.
        shown = _nonfinite.dropped(x) if self.nonfinite == "drop" else x
        out = _scale.settled(x, shown, coefficient, limit, like, **how)
        out = _sparse.in_range(out, shown)
        kept = jnp.all(coefficient == 1)
        if self.nonfinite == "drop":
            kept = jnp.all(jnp.isinf(limit)) | (kept & jnp.all(shown == x))
        return _sparse.wrapped(kept, original, matrix, out)
