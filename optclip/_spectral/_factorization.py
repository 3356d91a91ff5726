"""Compute singular vectors and values, accurate for any largest singular value.

Gram matrices in float32 do not resolve singular values below 1e-3 of the largest. So
the largest values are removed first, in stages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays._axis_names import Axes
from .._arrays._numerics import root
from ._matrix_algebra import adjoint, eigh, gram, product, times, without

# A Gram matrix resolves singular values within this factor of the largest to 1e-5.
# Values above this many thresholds are removed from the matrix first.
_WINDOW = 4.0

# After this many stages the remainder is below the rounding error of the first.
_MOST = 24

# The differentiable arguments of `factors`, or their tangents.
_Arguments = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Factors(NamedTuple):
    """Represent a matrix `(..., p, q)` as the product of `vectors` and `rows`.

    Attributes:
      vectors: `(..., p, p)`, the left singular vectors as columns.
      values: `(..., p)`, the singular values in ascending order.
      rows: `(..., p, q)`, the right singular vectors times the values.
    """

    vectors: jax.Array
    values: jax.Array
    rows: jax.Array


class _PartlyFactored(NamedTuple):
    """Hold a matrix without its removed singular values, and its factors.

    Attributes:
      x: The remaining matrix.
      vectors: The left singular vectors, of removed and of remaining values.
      values: The singular values.
      rows: The right singular vectors times the values, zero for remaining values.
      taken: Which singular values are removed.
      stage: The number of stages so far.
    """

    x: jax.Array
    vectors: jax.Array
    values: jax.Array
    rows: jax.Array
    taken: jax.Array
    stage: jax.Array


# JAX cannot differentiate the loop backward, and its derivative of eigenvectors divides
# by differences of equal eigenvalues.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def factors(
    split: Axes,
    x: jax.Array,
    lowest: jax.Array,
    squares: jax.Array,
    vectors: jax.Array,
) -> Factors:
    """Return the factors of matrices, accurate around their lowest thresholds.

    Args:
      split: Mapped axes that split the columns of `x`.
      x: The matrices, `(..., p, q)`.
      lowest: The lowest threshold of each, `(..., 1)`.
      squares: The eigenvalues of the Gram matrix of `x`, which suffice for a matrix
        whose largest singular value is within the window of its threshold.
      vectors: The eigenvectors of the Gram matrix.
    """
    return _compiled(split, x, lowest, squares, vectors)


# The function is compiled, since an eager call would compile the loop each time.
@functools.partial(jax.jit, static_argnums=0)
def _compiled(
    split: Axes,
    x: jax.Array,
    lowest: jax.Array,
    squares: jax.Array,
    vectors: jax.Array,
) -> Factors:
    def is_wide(left: _PartlyFactored) -> jax.Array:
        return jnp.any(_is_wide(left, lowest)) & (left.stage < _MOST)

    values = _roots_of(squares)
    taken = jnp.zeros_like(values, bool)
    stage = jnp.zeros((), jnp.int32)
    start = _PartlyFactored(x, vectors, values, jnp.zeros_like(x), taken, stage)
    left = lax.while_loop(
        is_wide, lambda left: _without_largest(left, lowest, split), start
    )
    # A remainder whose square vanishes is the rounding error of earlier stages.
    rest = ~left.taken & (_largest(left) > 0)
    rows = left.rows + product(adjoint(_chosen(left.vectors, rest)), left.x)
    return Factors(left.vectors, left.values, rows)


def _roots_of(squares: jax.Array) -> jax.Array:
    noise = 4 * jnp.finfo(squares.dtype).eps * squares.shape[-1] ** 0.5
    is_nonzero = squares > jnp.maximum(noise * squares[..., -1:], _least(squares))
    # Rounding turns zero eigenvalues into small or negative ones. They count as 0,
    # which responses do not enlarge.
    return root(jnp.where(is_nonzero, squares, jnp.zeros_like(squares)))


def _least(squares: jax.Array) -> float:
    """Return the smallest square that counts, above underflow of its differences."""
    info = jnp.finfo(squares.dtype)
    return float(info.tiny / info.eps)


def _chosen(vectors: jax.Array, which: jax.Array) -> jax.Array:
    """Return the vectors, zeros for the others, so that shapes stay fixed in a loop."""
    return jnp.where(which[..., None, :], vectors, jnp.zeros_like(vectors))


def _largest(left: _PartlyFactored) -> jax.Array:
    """Return the largest singular value that is not removed, `(..., 1)`."""
    remaining = jnp.where(left.taken, jnp.zeros_like(left.values), left.values)
    return jnp.max(remaining, -1, keepdims=True)


def _is_wide(left: _PartlyFactored, lowest: jax.Array) -> jax.Array:
    """Return whether the Gram matrix does not resolve the lowest threshold."""
    return _largest(left) > _WINDOW * lowest


def _without_largest(
    left: _PartlyFactored, lowest: jax.Array, split: Axes
) -> _PartlyFactored:
    """Remove the singular values near the largest from a matrix.

    They are removed on both sides, because an error of 1e-7 in a vector of one side
    leaves that fraction of the singular value, which may be 1000 thresholds. Values of
    earlier stages are removed again, since rounding leaves 1e-7 of the rest in their
    directions.
    """
    edge = jnp.maximum(_largest(left) / _WINDOW, lowest)
    chosen = ~left.taken & (left.values > edge) & _is_wide(left, lowest)
    taken = left.taken | chosen
    rows = left.rows + product(adjoint(_chosen(left.vectors, chosen)), left.x)
    ours = _chosen(left.vectors, taken)
    # Rows of remaining values are zero, so that dividing them by 1 changes nothing.
    theirs = times(1 / jnp.where(taken, left.values, 1)[..., None], rows)
    x = without(left.x, ours, theirs, split)
    values, vectors = _spectrum_beside(gram(x, split), ours, taken)
    # Removed values and vectors are final; the others are measured again without them.
    values = jnp.where(taken, left.values, values)
    vectors = jnp.where(taken[..., None, :], left.vectors, vectors)
    return _PartlyFactored(x, vectors, values, rows, taken, left.stage + 1)


def _spectrum_beside(
    squared: jax.Array, ours: jax.Array, taken: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the values and vectors of the rest, orthogonal to removed vectors.

    The spectrum includes places for removed vectors. Their eigenvalues are shifted to a
    negative number, so that they do not mix with vectors of zero eigenvalues. The shift
    is a mean of the eigenvalues, as a larger one would cost digits.
    """
    trace = jnp.trace(jnp.real(squared), axis1=-2, axis2=-1)[..., None, None]
    some = jnp.maximum(trace, _least(trace))
    mean = jnp.sum((jnp.abs(squared) / some) ** 2, (-2, -1), keepdims=True) * some
    below = jnp.maximum(mean, _least(mean))
    squares, vectors = eigh(squared - times(below, product(ours, adjoint(ours))))
    values = _roots_of(squares)
    count = jnp.sum(taken, -1, keepdims=True, dtype=jnp.int32)
    place = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    index = jnp.mod(place + count, values.shape[-1])
    values = jnp.take_along_axis(values, index, -1)
    return values, jnp.take_along_axis(vectors, index[..., None, :], -1)


@factors.defjvp
def _factors_jvp(
    split: Axes, primals: _Arguments, tangents: _Arguments
) -> tuple[Factors, Factors]:
    """Differentiate the factors; vectors of equal singular values do not rotate.

    Their derivative is unbounded otherwise.
    """
    factored = factors(split, *primals)
    inner = product(adjoint(factored.vectors), tangents[0])
    # The tangents of eigenvalues and eigenvectors follow from the tangent of x.
    moved = change_of_squares(factored, inner, split)
    apart, gap = gaps(factored.values)
    # Vectors of equal singular values do not rotate, so that the quotient is 0.
    turned = times(jnp.where(apart, -1 / gap, jnp.zeros_like(gap)), moved)
    # A singular value of 0 has no derivative. It is set to 0, and the divisor to 1.
    live = factored.values > 0
    slope = jnp.real(jnp.diagonal(moved, axis1=-2, axis2=-1)) / 2
    values = jnp.where(live, slope / jnp.where(live, factored.values, 1), 0)
    rows = inner - product(turned, factored.rows)
    return factored, Factors(product(factored.vectors, turned), values, rows)


def change_of_squares(factored: Factors, inner: jax.Array, split: Axes) -> jax.Array:
    """Return the tangent of the Gram matrix, in the basis of the left vectors.

    `inner` is the tangent of the rows in this basis.
    """
    turned = product(inner, adjoint(factored.rows), split)
    return turned + adjoint(turned)


def gaps(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which singular values differ, and the differences of their squares.

    The difference of equal values is replaced by 1.
    """
    one, other = values[..., :, None], values[..., None, :]
    near = jnp.sqrt(jnp.finfo(values.dtype).eps) * (one + other)
    apart = jnp.abs(one - other) > near
    gap = (one - other) * (one + other)
    # The gap is a divisor, which must not be 0 in the branch that is not selected.
    return apart, jnp.where(apart, gap, jnp.ones_like(gap))
