"""The one clip: measure over a scope, respond to a threshold, apply.

Both layers stand on `Clip`. `functional` gives it thresholds; `transforms` asks a
rule for them between `measure` and `apply`. Norms, thresholds and factors are `Rows`
here, one entry a block, and trees of the scope's structure outside.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip import (
    _arithmetic,
    _collectives,
    _elements,
    _leaves,
    _mapped,
    _nonfinite,
    _scale,
    _sparse,
    _validate,
    norms,
)
from optclip._elements import Limits
from optclip._opened import Opened, opened_by
from optclip._rows import Rows
from optclip.norms import Block, Measured, Norm
from optclip.responses import Response
from optclip.responses._resolve import at_step, compares, is_ours
from optclip.scopes._scope import Element, Scope

# How far a measured norm may be from the true one, with the roundings of scaling:
# half the width of the band that a strict clip keeps clear, by orders 1, 2, inf and
# by any other.
_BAND = {"float32": (2.0**-20, 2.0**-14), "float64": (2.0**-46, 2.0**-40)}


class Reading(NamedTuple):
    """The norm of each block, and whether it held a non-finite entry."""

    measured: Rows
    bad: Rows


@dataclasses.dataclass(frozen=True)
class Clip:
    """A clip short of its threshold: what is measured, and what then happens."""

    scope: Scope
    norm: Norm
    response: Response
    eps: Any = 0.0
    strict: bool = False
    nonfinite: str = "propagate"
    norm_mask: Any = None
    clip_mask: Any = None
    axis_name: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.scope, Scope):
            raise TypeError(
                f"over={self.scope!r} is no scope. Give optclip.TREE, LEAF, ELEMENT,"
                " axes(...), units(...), groups(...) or a subclass of"
                " optclip.scopes.Scope."
            )
        if not isinstance(self.norm, Norm):
            raise TypeError(
                f"norm={self.norm!r} is no norm. Give optclip.norms.L1, L2, INF, RMS,"
                " AVERAGE or Norm(p)."
            )
        _validate.choice("nonfinite", self.nonfinite, _nonfinite.POLICIES)
        _validate.flag("strict", self.strict)
        _validate.plain("eps", self.eps)
        _mapped.check(self.axis_name)

    @property
    def moves_elements(self) -> bool:
        """Whether single elements go to a bound, rather than times a coefficient."""
        return isinstance(self.scope, Element) and hasattr(self.response, "element")

    def fit(self, name: str, values: list[Any], measured: Rows) -> Any:
        """The threshold of each block in the dtype and shape of its norm, at least 0.

        Rows like the norms; where single elements are moved a list, each as it was
        given, since it is to broadcast to the leaf.

        Raises:
          ValueError: one does not broadcast to the shape of its norm.
        """
        limits: list[Any] = [None] * len(values)
        for index, m in zip(measured.indices, measured.values, strict=True):
            norm = m.root if len(index) == 1 else m.root[0]
            known: dict[int, jax.Array] = {}  # Most often all are one number.
            for i in index:
                if id(values[i]) not in known:
                    known[id(values[i])] = self._fitted(name, values[i], norm)
                limits[i] = known[id(values[i])]
        if self.moves_elements:
            return [_at_least_0(limit) for limit in limits]
        return measured.with_entries(limits).map(_at_least_0)

    def _fitted(self, name: str, value: Any, norm: jax.Array) -> jax.Array:
        limit = _scale.as_limit(value, norm.dtype, towards_zero=self.strict)
        _mapped.check_alike(name, limit, norm)
        _mapped.check_alike("eps", jnp.asarray(self.eps), norm)
        if self.moves_elements:
            return limit
        _validate.broadcasts(name, limit.shape, norm.shape)
        return _arithmetic.spread(limit, norm)

    def at(self, step: jax.Array) -> "Clip":
        """The same with the response as it is for a step."""
        return dataclasses.replace(self, response=at_step(self.response, step))

    def at_init(self) -> "Clip":
        """The same, told nothing of mapped axes unless their types are known here."""
        if _mapped.is_typed_here():
            return self
        return dataclasses.replace(self, axis_name=())

    def open(self, tree: Any) -> Opened:
        """Which leaves are measured, which are scaled, and by whose norm."""
        masks = self.norm_mask, self.clip_mask
        return opened_by(self.scope, tree, *masks, self.axis_name)

    def measure(self, opened: Opened) -> Reading:
        """The norms, short of the entries that the policy drops."""
        if self.nonfinite != "drop":
            measured = norms.measure_rows(opened.blocks, self.norm)
            return Reading(measured, measured.map(lambda m: ~jnp.isfinite(m.root)))
        flags = [_each(_nonfinite.flags, block) for block in opened.blocks]
        kept = [_each(_nonfinite.dropped, block) for block in opened.blocks]
        found = norms.measure_rows(flags, norms.INF)
        measured = norms.measure_rows(kept, self.norm)
        # As rows of other arrays, these need not be rows like those.
        bad = found.map(lambda m: m.root > 0).entries()
        return Reading(measured, measured.with_entries(bad))

    def check_spans(self, opened: Opened) -> None:
        """Raise unless what slices have in common can be known on all devices."""
        slices = [block for block in opened.blocks if block.axis is not None]
        if any(_leaves.axis_name_of(block.leaves[0]) != () for block in slices):
            _mapped.check_all_known()

    def respond(self, measured: Measured, threshold: jax.Array) -> _scale.Factor:
        """What to multiply a block by."""
        if self.nonfinite != "zero":
            return self._factor(measured, threshold)
        bad = ~jnp.isfinite(measured.root)
        # No NaN on the way, which would trip jax.debug_nans.
        sound = jnp.where(bad, jnp.zeros_like(measured.root), measured.root)
        factor = self._factor(measured._replace(root=sound), threshold)
        # A NaN threshold stays NaN: it is no gradient's fault.
        zeroed = bad & jnp.isfinite(threshold)
        return _scale.factor(jnp.where(zeroed, 0.0, factor.near), factor.far)

    def _factor(self, measured: Measured, threshold: jax.Array) -> _scale.Factor:
        if not self.strict:
            return _scale.respond(self.response, measured, threshold, self.eps)
        band = _BAND[measured.root.dtype.name][self.norm.ord not in (1, 2, jnp.inf)]
        upper, lower = threshold * (1 - band), threshold * (1 - 2 * band)
        outer = _scale.respond(self.response, measured, upper, self.eps)
        inner = _scale.respond(self.response, measured, lower, self.eps)
        # Below the band nothing is done; in it and above, down to its lower edge.
        clear = (outer.coefficient == 1) & ~jnp.isnan(inner.coefficient)
        return jax.tree.map(lambda o, i: jnp.where(clear, o, i), outer, inner)

    def keep(self, tree: Any, thresholds: Any) -> Any:
        """The norms that the response would leave of those of a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        measured = Rows([Measured(norm, jnp.ones_like(norm)) for norm in leaves])
        limits = self.fit("threshold", treedef.flatten_up_to(thresholds), measured)
        if not isinstance(limits, Rows):
            pairs = zip(limits, leaves, strict=True)
            limits = measured.with_entries([_arithmetic.spread(*p) for p in pairs])
        factors = self._factors(measured, limits)
        kept = measured.map(lambda m, factor: m.root * factor.coefficient, factors)
        return treedef.unflatten(kept.entries(as_slices=True))

    def apply(self, opened: Opened, measured: Any, limits: Any) -> tuple[Any, Any]:
        """The clipped tree, and the coefficient of each block.

        Norms, limits and coefficients are `Rows`; but where single elements are moved
        lists, and the norms are not looked at. A limit is a threshold as `fit` returns
        it or, for elements, `Limits`.
        """
        if self.nonfinite == "raise":
            self._check(opened)
        if compares(self.response):
            self.check_spans(opened)
        out = list(opened.leaves)
        if self.moves_elements:
            coefficients = [jnp.ones(()) for _ in opened.blocks]
            for i, block in opened.owned():
                path = opened.flat.paths[i]
                found = self._bounded(path, opened.leaves[i], limits[block])
                out[i], coefficients[block] = found
            return opened.flat.rebuild(out), coefficients
        pairs = _scale.held(self._factors(measured, limits))
        factors = [_scale.factor(*pair) for pair in pairs.entries()]
        limit_of = limits.entries()
        owned = opened.owned()
        leaves = {i: opened.leaves[i] for i, _ in owned}
        leaves = _collectives.read_again(leaves, dict(owned))
        for i, block in owned:
            axis = opened.blocks[block].axis
            out[i] = self._scaled(leaves[i], factors[block], limit_of[block], axis)
        coefficients = pairs.map(lambda pair: _scale.factor(*pair).coefficient)
        return opened.flat.rebuild(out), coefficients

    def _factors(self, measured: Rows, limits: Rows) -> Rows:
        if is_ours(self.response):
            return measured.map(self.respond, limits)
        # One that is not may want to see numbers, one by one.
        asked = zip(measured.entries(), limits.entries(), strict=True)
        return measured.with_entries([self.respond(m, c) for m, c in asked])

    def _bounded(self, path, leaf, limit):
        lower, upper = limit if isinstance(limit, Limits) else (-limit, limit)
        for which, bound in (("lower", lower), ("upper", upper)):
            like = leaf.data if _leaves.is_sparse(leaf) else leaf
            _mapped.check_alike(which, bound, like)
        name = f"the leaf '{_leaves.path_str(path)}'"
        cleaned = self.nonfinite in ("zero", "drop")
        return _elements.bounded(
            name, leaf, lower, upper, self.response, strict=self.strict, cleaned=cleaned
        )

    def _scaled(self, leaf, factor, limit, axis):
        original = leaf
        if self.nonfinite == "drop":
            leaf = _nonfinite.dropped(leaf)
        if not _leaves.is_sparse(leaf):
            x = _leaves.values(original)
            return self._settle(x, _leaves.values(leaf), factor, limit, x)
        like = original.data
        # Rounding duplicates one by one could make their sum larger.
        apart = self.strict and _sparse.has_duplicates(leaf)
        if factor.near.ndim == 0 and not apart:
            data = self._settle(like, leaf.data, factor, limit, like)
            return _sparse.with_data(leaf, data)
        off = jnp.all(jnp.isinf(limit))
        # Slices of a dense gradient can be told apart only once duplicates are summed.
        mat = _sparse.summed(leaf)
        if factor.near.ndim and not _sparse.lies_in_data(mat, axis):
            parts = (_sparse.at_entries(f, mat) for f in (factor.near, factor.far))
            factor = _scale.factor(*parts)
            limit = _sparse.at_entries(limit, mat)
        whole = _sparse.summed(original).data
        data = self._settle(whole, mat.data, factor, limit, like)
        return _sparse.unless(off, original, mat, data)

    def _settle(self, original, x, factor, limit, like):
        return _scale.settled(
            original, x, factor, limit, like, strict=self.strict, policy=self.nonfinite
        )

    def _check(self, opened: Opened) -> None:
        paths = [opened.flat.paths[i] for i in opened.seen]
        _nonfinite.check(paths, [opened.leaves[i] for i in opened.seen])


def _at_least_0(limit: jax.Array) -> jax.Array:
    # Not the maximum, whose derivative at 0 is halved.
    return jnp.where(limit < 0, jnp.zeros_like(limit), limit)


def _each(function: Any, block: Block) -> Block:
    leaves = [
        _leaves.hold(function(_leaves.unwrap(x)), _leaves.axis_name_of(x))
        for x in block.leaves
    ]
    return dataclasses.replace(block, leaves=leaves)
