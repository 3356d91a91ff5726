"""Clip singular values and keep the singular vectors.

The measurement decomposes each matrix and passes the decomposition to the action. The
result is the matrix times a function of its Gram matrix, `F = u k u^*`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from .._arrays import _closures, _leaves, _placement, _validate
from .._arrays._axis_names import Axes
from .._arrays._batching import Batched
from .._arrays._leaf import Leaf
from .._arrays._numerics import root
from .._arrays._types import Number
from .._clip import (
    Action,
    Clip,
    Decision,
    coefficients_of,
    one_where_unscaled,
    respond,
    scaled_leaf,
)
from .._norms import L2, Block, Measured, Measurement, flush_small
from .._responses import BaseResponse, Detached, Hard, Normalize, Smooth
from . import _newton_schulz
from ._factorization import Factors, change_of_squares, factors, gaps
from ._matrix_algebra import adjoint, product, times
from ._matrix_blocks import (
    Factored,
    MatrixBlock,
    factored,
    from_matrices,
    in_units,
    matrices_of,
    singular_values,
    with_vectors,
)

SMOOTH, NORMALIZE = Smooth(), Normalize()


@dataclasses.dataclass(frozen=True)
class SingularValueNorms(Measurement):
    """Measure all singular values of each matrix, or a bound on the largest.

    Attributes:
      method: `"eigh"` for the values, `"newton_schulz"` for the bound.
    """

    method: Literal["eigh", "newton_schulz"]

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the singular values in ascending order, and the decompositions."""
        work: list[Factored | None] = [None] * len(blocks)

        def of_matrix(i: int) -> jax.Array:
            matrices = matrices_of(blocks[i])
            # A mesh of Explicit axes requires a sharding for each decomposed part.
            x, unit, size = map(_placement.whole, matrices[:3])
            matrices = matrices._replace(x=x, unit=unit, size=size)
            if self.method == "newton_schulz":
                work[i] = Factored(matrices, None, None)
                bound = _newton_schulz.bound(matrices.x, matrices.split)[..., 0]
                return in_units(matrices, bound)
            work[i] = parts = factored(matrices)
            return singular_values(matrices, parts.squares)

        norms = with_vectors(blocks, of_matrix)
        return Measured(Batched(norms).map(flush_small), work=work)


@dataclasses.dataclass(frozen=True)
class Cap(Action):
    """Multiply each singular value by its coefficient.

    Attributes:
      method: How the matrices are reassembled.
    """

    method: Literal["eigh", "newton_schulz"]

    def apply(self, decision: Decision) -> tuple[dict[int, object], Batched]:
        """Return the clipped leaves by index, and the coefficients."""
        clip = decision.clip
        coefficients = coefficients_of(clip, decision.norms, decision.thresholds)
        of_block, limits = coefficients.entries(), decision.thresholds.entries()
        capped = {}
        for i, leaf, block in decision.layout.scaled:
            parts = decision.work[block]
            if not isinstance(parts, Factored):
                # A vector is not decomposed: its one singular value is its norm.
                capped[i] = scaled_leaf(clip, leaf, of_block[block])
                continue
            new = self._capped(clip, parts, limits[block])
            size = parts.matrices.size
            # NaN from NaN and inf only; a constant would trip jax.debug_nans elsewhere.
            other = jnp.zeros_like(size) if clip.nonfinite == "zero" else size - size
            new = jnp.where(jnp.isfinite(size), new, other.astype(new.dtype))
            same = of_block[block] == 1
            if self.method == "newton_schulz" and clip.response == NORMALIZE:
                # The norm is a bound, which may equal the threshold by chance.
                same = decision.norms.entries()[block] == 0
            unclipped = jnp.all(same, -1, keepdims=True)
            off = jnp.all(limits[block] == jnp.inf, -1, keepdims=True)
            capped[i] = _as_leaf(leaf, parts.matrices, new, unclipped | off)
        return capped, one_where_unscaled(decision.layout, coefficients)

    def _capped(self, clip: Clip, parts: Factored, limit: jax.Array) -> jax.Array:
        """Return the clipped matrices."""
        matrices = parts.matrices
        # A matrix of one row has one singular value, its norm: no product is needed.
        if self.method == "newton_schulz" and matrices.x.shape[-2] > 1:
            return self._by_products(clip, matrices, limit[..., None])
        clipped = mapped(
            parts,
            limit,
            functools.partial(_coefficients, clip),
            detached=isinstance(clip.response, Detached),
            signed=clip.response.signed,
        )
        return times(matrices.unit, clipped)

    def _by_products(
        self, clip: Clip, matrices: MatrixBlock, limit: jax.Array
    ) -> jax.Array:
        """Return the clipped matrices, by matrix products only."""
        if clip.response == NORMALIZE:
            # Infinity times 0 would be NaN; such a matrix is unclipped.
            finite = jnp.where(jnp.isinf(limit), jnp.ones_like(limit), limit)
            return times(
                finite, _newton_schulz.polar_factor(matrices.x, matrices.split)
            )
        capped = _newton_schulz.capped(
            matrices.x,
            limit / matrices.unit,
            matrices.split,
            is_smooth=clip.response == SMOOTH,
        )
        return times(matrices.unit, capped)


def _coefficients(clip: Clip, values: jax.Array, limit: jax.Array) -> jax.Array:
    """Return the coefficient of each singular value, 0 for noise if it may be large."""
    coefficients = respond(clip, values, limit)
    if not clip.response.signed:
        return coefficients
    is_noise = values < _noise(values) * jnp.max(values, -1, keepdims=True)
    return jnp.where(is_noise, jnp.zeros_like(values), coefficients)


def _noise(values: jax.Array) -> float:
    """Return the fraction of the largest singular value below which others are 0."""
    return float(16 * jnp.finfo(values.dtype).eps)


def _as_leaf(
    leaf: Leaf, matrices: MatrixBlock, capped: jax.Array, unclipped: jax.Array
) -> jax.Array:
    """Return the clipped leaf, bit-identical in unclipped matrices."""
    x = jnp.asarray(leaf.array)
    out, unclipped = (
        from_matrices(each, matrices.sides, x)
        for each in (capped, jnp.broadcast_to(unclipped[..., None], capped.shape))
    )
    # The select keeps a matrix bit-identical if none of its values is clipped.
    return jnp.where(unclipped, x, _leaves.narrow(out, leaf.like))


def parts_of_singular_values(
    method: Literal["eigh", "newton_schulz"],
    norm: Measurement,
    response: BaseResponse,
    eps: Number,
) -> tuple[Measurement, Action]:
    """Choose the measurement and the action for a scope of singular values.

    Raises:
      ValueError: the norm, the response or `eps` does not apply to singular values.
    """
    advice = "Omit norm=, since each singular value is a single number."
    _validate.require("norm", norm, norm == L2, "'l2'", advice)
    wanted = "a response that depends on a single singular value"
    advice = "Pass 'hard' or 'smooth'."
    _validate.require("response", response, not response.compares_norms, wanted, advice)
    if method == "newton_schulz":
        is_right = response in (Hard(), SMOOTH, NORMALIZE)
        wanted = "'hard', 'smooth' or 'normalize' for method='newton_schulz'"
        advice = "Pass method='eigh' for other responses."
        _validate.require("response", response, is_right, wanted, advice)
        is_zero = isinstance(eps, (int, float)) and eps == 0
        _validate.require("eps", eps, is_zero, "0", "Only method='eigh' supports eps.")
    return SingularValueNorms(method), Cap(method)


# (singular values, thresholds) -> coefficients, all of them (..., p).
Coefficient = Callable[[jax.Array, jax.Array], jax.Array]

# The differentiable arguments of `_mapped`, or their tangents.
_Arguments = tuple[Factors, jax.Array, jax.Array, jax.Array, *tuple[jax.Array, ...]]


def mapped(
    factored: Factored,
    limit: jax.Array,
    coefficient: Coefficient,
    *,
    detached: bool,
    signed: bool = False,
) -> jax.Array:
    """Return each matrix with each singular value times its coefficient, in its `unit`.

    If `detached`, the coefficients are constants to `jax.grad`. If `signed`, the limits
    are parameters, so that values of all sizes must be accurate.
    """
    matrices, squares, vectors = factored
    if squares is None or vectors is None:
        coefficients = coefficient(singular_values(matrices), limit)[..., None]
        return times(coefficients, matrices.x)
    unit = matrices.unit[..., 0]
    # Singular values beyond the smaller side are zero, so any threshold fits them.
    beyond = matrices.x.shape[-2] - limit.shape[-1]
    limit = jnp.pad(limit, [*[(0, 0)] * (limit.ndim - 1), (beyond, 0)], mode="edge")
    # The rule below runs later and differentiates with respect to the arrays that the
    # coefficient closes over, such as the value of a schedule, so they are arguments.
    function, consts = _closures.converted(coefficient, limit, limit)
    if signed:
        lowest = _noise(squares) * root(squares[..., -1:])
    else:
        # A threshold of 0 makes all values 0, whatever their accuracy.
        lowest = jnp.min(jnp.where(limit > 0, limit, jnp.inf), -1, keepdims=True) / unit
    split, x = matrices.split, matrices.x
    decomposition = factors(split, x, lowest, squares, vectors)
    return _mapped(function, split, detached, decomposition, x, unit, limit, *consts)


# The derivative is written for x, since factors have none at equal singular values.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _mapped(
    function: Callable[..., jax.Array],
    split: Axes,
    detached: bool,
    factored: Factors,
    x: jax.Array,
    unit: jax.Array,
    limit: jax.Array,
    *consts: jax.Array,
) -> jax.Array:
    coefficients = function(factored.values * unit, limit, *consts)
    return product(factored.vectors, times(coefficients[..., None], factored.rows))


@_mapped.defjvp
def _mapped_jvp(
    function: Callable[..., jax.Array],
    split: Axes,
    detached: bool,
    primals: _Arguments,
    tangents: _Arguments,
) -> tuple[jax.Array, jax.Array]:
    """Differentiate by divided differences of F, or by its slope at equal values.

    The tangent of x enters directly, since its factors have none at equal values.
    """
    factored, _, unit, limit, *consts = primals
    _, dx, _, dlimit, *dconsts = tangents

    def coefficient(
        values: jax.Array, limit: jax.Array, *consts: jax.Array
    ) -> jax.Array:
        return function(values * unit, limit, *consts)

    by_limit = functools.partial(coefficient, factored.values)
    coefficients, moved = jax.jvp(by_limit, (limit, *consts), (dlimit, *dconsts))
    inner = product(adjoint(factored.vectors), dx)
    change = times(coefficients[..., None], inner)
    change += times(moved[..., None], factored.rows)
    if not detached:
        _, slope = jax.jvp(
            lambda values: coefficient(values, limit, *consts),
            (factored.values,), (jnp.ones_like(factored.values),),
        )  # fmt: skip
        quotients = _divided_differences(factored.values, coefficients, slope)
        turned = times(quotients, change_of_squares(factored, inner, split))
        change += product(turned, factored.rows)
    return _mapped(function, split, detached, *primals), product(
        factored.vectors, change
    )


def _divided_differences(
    values: jax.Array, coefficients: jax.Array, slope: jax.Array
) -> jax.Array:
    """Return the change of each coefficient per change of the squared values."""
    apart, gap = gaps(values)
    quotient = (coefficients[..., :, None] - coefficients[..., None, :]) / gap
    # A singular value of 0 counts as having no slope, so that nothing divides by it.
    live = values > 0
    slope_by_square = jnp.where(live, slope / jnp.where(live, 2 * values, 1), 0)
    # Where two singular values are equal, the quotient is the slope.
    mean = (slope_by_square[..., :, None] + slope_by_square[..., None, :]) / 2
    return jnp.where(apart, quotient, mean)
