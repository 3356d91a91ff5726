"""Singular values as what a clip scales: the same singular vectors, other values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _placement, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree
from optclip._clip import _newton_schulz, _nonfinite, _spectrum
from optclip._clip._clip import ScalingClip
from optclip._clip._layout import Layout
from optclip.norms import Block, _matrices, _measure, _roots
from optclip.norms._matrices import Matrices
from optclip.norms._norm import L2, Norm
from optclip.responses import Detached, Hard, Response, Smooth
from optclip.responses._resolve import compares
from optclip.scopes._matrices import SingularValues

SOFT = Smooth()


class SpectrumClip(ScalingClip):
    """Each singular value times its coefficient, its singular vectors as they are."""

    def measure(self, layout: Layout, **_: bool) -> Batched:
        """The singular values of each matrix, in ascending order."""
        shown = self.shown(layout)
        found = _measure.with_vectors(
            shown, lambda i: self._norms(self._matrices(shown[i]))
        )
        return Batched(found).map(_roots.large_enough)

    def bad(self, layout: Layout, measured: Batched) -> Batched:
        """Whether each matrix has an entry, or a norm, that is not finite."""
        bad = measured.map(lambda norm: ~jnp.isfinite(norm))
        if self.nonfinite != "drop":
            return bad
        whole = [_matrices.matrices_of(b, _dtype(b)) for b in layout.blocks]
        found = [~jnp.isfinite(m.size[..., 0]) for m in whole]
        pairs = zip(bad.entries(), found, strict=True)
        return measured.with_entries([one | other for one, other in pairs])

    def apply(
        self, layout: Layout, measured: Batched, limits: Batched
    ) -> tuple[PyTree, Batched]:
        """The clipped tree, and the coefficient of each singular value."""
        self.check(layout)
        found = self.coefficients(measured, limits)
        coefficients, limit_of = found.entries(), limits.entries()
        shown, out = self.shown(layout), {}
        for i, block in layout.owned():
            limit = limit_of[block]
            if _matrices.is_vector(shown[block]):
                x = jnp.asarray(layout.arrays[i])
                out[i] = self._scaled(layout, i, x, coefficients[block], limit)
                continue
            matrices = self._matrices(shown[block])
            clipped = self._finite(matrices, self._mapped(matrices, limit))
            kept = jnp.all(coefficients[block] == 1, -1, keepdims=True)
            off = jnp.all(jnp.isinf(limit), -1, keepdims=True)
            out[i] = self._chosen(layout, i, matrices, clipped, kept, off)
        return layout.rebuild(out), found

    def _matrices(self, block: Block) -> Matrices:
        found = _matrices.matrices_of(block, _dtype(block))
        # A mesh of Explicit axes asks where each part of a decomposition is to be.
        x, unit, size = map(_placement.whole, (found.x, found.unit, found.size))
        return found._replace(x=x, unit=unit, size=size)

    def _norms(self, matrices: Matrices) -> jax.Array:
        return _matrices.singular_values(matrices)

    def _mapped(self, matrices: Matrices, limit: jax.Array) -> jax.Array:
        detached = isinstance(self.response, Detached)
        return _spectrum.mapped(matrices, limit, self.respond, detached=detached)

    def _finite(self, matrices: Matrices, clipped: jax.Array) -> jax.Array:
        """What was clipped, as the policy says where an entry is not finite."""
        other = jnp.zeros_like(matrices.size)
        if self.nonfinite not in ("zero", "drop"):
            # NaN of inf and NaN alone, which would trip jax.debug_nans elsewhere.
            other = matrices.size - matrices.size
        other = other.astype(clipped.dtype)
        return jnp.where(
            jnp.isfinite(matrices.size), _matrices.times(matrices.unit, clipped), other
        )

    def _chosen(
        self,
        layout: Layout,
        i: int,
        matrices: Matrices,
        clipped: jax.Array,
        kept: jax.Array,
        off: jax.Array,
    ) -> jax.Array:
        """The leaf, to the bit where nothing of a matrix is clipped."""
        x, like = jnp.asarray(layout.arrays[i]), layout.like(i)
        flags = (jnp.broadcast_to(f[..., None], clipped.shape) for f in (kept, off))
        out, kept, off = (
            _placement.placed_as(_matrices.as_leaf(each, matrices.axis), x)
            for each in (clipped, *flags)
        )
        out = _leaves.narrow(out, like)
        shown = _nonfinite.dropped(x) if self.nonfinite == "drop" else x
        return jnp.where(off, x, jnp.where(kept, shown, out))


class NewtonSchulzClip(SpectrumClip):
    """Singular values capped by matrix products alone; measured is a bound on each."""

    def _norms(self, matrices: Matrices) -> jax.Array:
        found = _newton_schulz.bound(matrices.x, matrices.split)[..., 0]
        return _matrices.in_units(matrices, found)

    def _mapped(self, matrices: Matrices, limit: jax.Array) -> jax.Array:
        # A matrix of one row has one singular value, its norm: no product is needed.
        if matrices.x.shape[-2] <= 1:
            return super()._mapped(matrices, limit)
        return _newton_schulz.capped(
            matrices.x,
            limit[..., None] / matrices.unit,
            matrices.split,
            is_soft=self.response == SOFT,
        )


def spectrum_clip(
    scope: SingularValues, norm: Norm, response: Response, eps: Any, strict: bool,
    *rest: Any,
) -> SpectrumClip:  # fmt: skip
    """The clip of its method, its arguments checked."""
    if norm != L2:
        advice = "A singular value has one size: leave `norm` out."
        raise ValueError(_validate.must_be("norm", "'l2'", norm, advice))
    if compares(response):
        wanted = "one that looks at one singular value at a time"
        raise ValueError(_validate.must_be("response", wanted, response))
    if scope.method == "eigh":
        return SpectrumClip(scope, norm, response, eps, strict, *rest)
    if response not in (Hard(), SOFT):
        advice = "Others need the singular values themselves: give method='eigh'."
        wanted = "'hard' or 'smooth' for method='newton_schulz'"
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    if not (isinstance(eps, (int, float)) and eps == 0):
        advice = "Give method='eigh' with it."
        raise ValueError(_validate.must_be("eps", "0", eps, advice))
    return NewtonSchulzClip(scope, norm, response, eps, strict, *rest)


def _dtype(block: Block) -> Any:
    return _leaves.real_dtype(block.leaves[0].dtype)
