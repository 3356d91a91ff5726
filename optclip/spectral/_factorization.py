"""The singular vectors and values of a matrix, whatever its largest is.

From Gram matrices, which in float32 resolve no singular value below 1e-3 of the
largest: the largest are taken out first, in stages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays._axis_names import Axes
from optclip._arrays._numerics import root
from optclip.spectral._matrix_blocks import adjoint, eigh, gram, product, times

# A Gram matrix resolves singular values within this factor of the largest to 1e-5.
# Larger ones than so many thresholds are taken out of the matrix first.
_WINDOW = 4.0

# The remainder after so many stages is below the rounding of the first.
_MOST = 24


class Factors(NamedTuple):
    """A matrix `(..., p, q)` as the product of `vectors` and `rows`.

    Attributes:
      vectors: `(..., p, p)`, the left singular vectors, one a column.
      values: `(..., p)`, the singular values in ascending order.
      rows: `(..., p, q)`, the right singular vectors times the values.
    """

    vectors: jax.Array
    values: jax.Array
    rows: jax.Array


class _PartlyFactored(NamedTuple):
    """A matrix without the singular values taken out so far, and its factors.

    Attributes:
      x: the remaining matrix.
      vectors: the left singular vectors, of taken and of remaining values.
      values: the singular values.
      rows: the right singular vectors times the values, zero if not taken.
      taken: which singular values are taken out.
      stage: the number of stages so far.
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
      split: the mapped axes that the columns of `x` are split over.
      x: the matrices, `(..., p, q)`.
      lowest: the lowest threshold of each, `(..., 1)`.
      squares: the eigenvalues of the Gram matrix of `x`, which suffice for a matrix
        whose largest singular value is within the window of its threshold.
      vectors: its eigenvectors.
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

    def without_largest(left: _PartlyFactored) -> _PartlyFactored:
        return _without_largest(left, lowest, split)

    values = _roots_of(squares)
    taken = jnp.zeros_like(values, bool)
    stage = jnp.zeros((), jnp.int32)
    start = _PartlyFactored(x, vectors, values, jnp.zeros_like(x), taken, stage)
    left = lax.while_loop(is_wide, without_largest, start)
    # A remainder whose square vanishes is the rounding error of earlier stages.
    rest = ~left.taken & (_largest(left) > 0)
    rows = left.rows + product(adjoint(_chosen(left.vectors, rest)), left.x)
    return Factors(left.vectors, left.values, rows)


def _spectrum(squared: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The roots of the eigenvalues in ascending order, and the vectors.

    What rounding leaves in place of a zero counts as zero, of which no response makes
    more.
    """
    squares, vectors = eigh(squared)
    return _roots_of(squares), vectors


def _roots_of(squares: jax.Array) -> jax.Array:
    noise = 4 * jnp.finfo(squares.dtype).eps * squares.shape[-1] ** 0.5
    is_nonzero = squares > jnp.maximum(noise * squares[..., -1:], _least(squares))
    # Eigenvalues below the noise, also negative ones, count as 0.
    return root(jnp.where(is_nonzero, squares, jnp.zeros_like(squares)))


def _least(squares: jax.Array) -> float:
    """The least square that is seen, whose differences do not underflow either."""
    info = jnp.finfo(squares.dtype)
    return float(info.tiny / info.eps)


def _chosen(vectors: jax.Array, which: jax.Array) -> jax.Array:
    """Return the vectors, zeros for the others, so that shapes stay fixed in a loop."""
    return jnp.where(which[..., None, :], vectors, jnp.zeros_like(vectors))


def _largest(left: _PartlyFactored) -> jax.Array:
    """Return the largest singular value that is not taken out, `(..., 1)`."""
    remaining = jnp.where(left.taken, jnp.zeros_like(left.values), left.values)
    return jnp.max(remaining, -1, keepdims=True)


def _is_wide(left: _PartlyFactored, lowest: jax.Array) -> jax.Array:
    """Whether the Gram matrix does not resolve what is as large as a threshold."""
    return _largest(left) > _WINDOW * lowest


def _without_largest(
    left: _PartlyFactored, lowest: jax.Array, split: Axes
) -> _PartlyFactored:
    """The matrix without the singular values that are near its largest.

    From both sides: an error of 1e-7 in a vector of one side leaves that much of the
    singular value, which may be 1000 thresholds. Each time anew what was taken out
    before, of which rounding leaves 1e-7 of what is still there.
    """
    edge = jnp.maximum(_largest(left) / _WINDOW, lowest)
    chosen = ~left.taken & (left.values > edge) & _is_wide(left, lowest)
    taken = left.taken | chosen
    rows = left.rows + product(adjoint(_chosen(left.vectors, chosen)), left.x)
    ours = _chosen(left.vectors, taken)
    # Rows of values that are not taken are zero, so that the divisor 1 changes nothing.
    theirs = times(1 / jnp.where(taken, left.values, 1)[..., None], rows)
    x = left.x
    for _ in range(2):
        x = x - product(ours, product(adjoint(ours), x))
        x = x - product(product(x, adjoint(theirs), split), theirs)
    values, vectors = _spectrum_beside(gram(x, split), ours, taken)
    # Taken values and vectors are final; the others are measured again without them.
    values = jnp.where(taken, left.values, values)
    vectors = jnp.where(taken[..., None, :], left.vectors, vectors)
    return _PartlyFactored(x, vectors, values, rows, taken, left.stage + 1)


def _spectrum_beside(
    squared: jax.Array, ours: jax.Array, taken: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """That of what is left, orthogonal to what was taken, which it has places for.

    Made negative, what was taken does not mix with what else is zero. By a mean of the
    eigenvalues: more would cost digits.
    """
    trace = jnp.trace(jnp.real(squared), axis1=-2, axis2=-1)[..., None, None]
    some = jnp.maximum(trace, _least(trace))
    mean = jnp.sum((jnp.abs(squared) / some) ** 2, (-2, -1), keepdims=True) * some
    below = jnp.maximum(mean, _least(mean))
    values, vectors = _spectrum(squared - times(below, product(ours, adjoint(ours))))
    count = jnp.sum(taken, -1, keepdims=True, dtype=jnp.int32)
    place = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    index = jnp.mod(place + count, values.shape[-1])
    values = jnp.take_along_axis(values, index, -1)
    return values, jnp.take_along_axis(vectors, index[..., None, :], -1)


@factors.defjvp
def _factors_jvp(split, primals, tangents):
    """Vectors of equal singular values do not turn, instead of without bound."""
    factored = factors(split, *primals)
    inner = product(adjoint(factored.vectors), tangents[0])
    # The tangents of the eigenvalues and eigenvectors follow from that of x.
    moved = change_of_squares(factored, inner, split)
    apart, gap = gaps(factored.values)
    # Equal singular values have no direction to turn to, so that the quotient is 0.
    turned = times(jnp.where(apart, -1 / gap, jnp.zeros_like(gap)), moved)
    # A singular value of 0 has no derivative; it is 0 by choice, and divides by 1.
    live = factored.values > 0
    slope = jnp.real(jnp.diagonal(moved, axis1=-2, axis2=-1)) / 2
    values = jnp.where(live, slope / jnp.where(live, factored.values, 1), 0)
    rows = inner - product(turned, factored.rows)
    return factored, Factors(product(factored.vectors, turned), values, rows)


def change_of_squares(factored: Factors, inner: jax.Array, split: Axes) -> jax.Array:
    """That of the Gram matrix between the left vectors, `inner` that of the rows."""
    turned = product(inner, adjoint(factored.rows), split)
    return turned + adjoint(turned)


def gaps(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which singular values differ, and the differences of their squares; 1 if not."""
    one, other = values[..., :, None], values[..., None, :]
    near = jnp.sqrt(jnp.finfo(values.dtype).eps) * (one + other)
    apart = jnp.abs(one - other) > near
    gap = (one - other) * (one + other)
    # The gap is a divisor, which must not be 0 in the branch that is not selected.
    return apart, jnp.where(apart, gap, jnp.ones_like(gap))
