"""A function of the singular values of a matrix, its singular vectors as they are.

That of the eigenvalues of the Gram matrix, `F = u k u^*`, times the matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays._axis_names import Axes
from optclip._arrays._numerics import root
from optclip.norms._matrices import (
    Matrices,
    adjoint,
    eigh,
    gram,
    product,
    singular_values,
    times,
)

# A Gram matrix resolves singular values within this factor of the largest to 1e-5.
# Larger ones than so many thresholds are taken out of the matrix first.
_WINDOW = 4.0

# What is left after so many times is below the rounding of the first.
_MOST = 24

# (singular values, thresholds) -> coefficients, all of them (..., p).
Coefficient = Callable[[jax.Array, jax.Array], jax.Array]


def mapped(
    matrices: Matrices, limit: jax.Array, coefficient: Coefficient, *, detached: bool
) -> jax.Array:
    """Each matrix with each singular value times its coefficient, in its `unit`.

    `detached`, the coefficients are constants to `jax.grad`.
    """
    if matrices.x.shape[-2] <= 1:
        found = coefficient(singular_values(matrices), limit)[..., None]
        return times(found, matrices.x)
    unit = matrices.unit[..., 0]
    # Beyond the smaller side of a matrix there are zeros, at whatever threshold.
    beyond = matrices.x.shape[-2] - limit.shape[-1]
    limit = jnp.pad(limit, [*[(0, 0)] * (limit.ndim - 1), (beyond, 0)], mode="edge")
    # What it closes over may be differentiated by, such as the value of a schedule.
    converted, consts = jax.closure_convert(coefficient, limit, limit)
    how = _How(converted, matrices.split, detached)
    return _mapped(how, matrices.x, unit, limit, *consts)


class _How(NamedTuple):
    """The function of a mapping, and what else is fixed while tracing."""

    coefficient: Callable[..., jax.Array]
    split: Axes
    detached: bool


class _Left(NamedTuple):
    """A matrix out of which the largest singular values were taken."""

    x: jax.Array
    values: jax.Array
    vectors: jax.Array
    limit: jax.Array
    taken: jax.Array
    isometry: jax.Array
    stage: jax.Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mapped(
    how: _How, x: jax.Array, unit: jax.Array, limit: jax.Array, *consts: Any
) -> jax.Array:
    def coefficient(values: jax.Array, limit: jax.Array) -> jax.Array:
        return how.coefficient(values * unit, limit, *consts)

    def is_wide(left: _Left) -> jax.Array:
        return jnp.any(_is_wide(left, unit)) & (left.stage < _MOST)

    def taken_out(left: _Left) -> _Left:
        return _without_largest(left, unit, coefficient, how.split)

    stage = jnp.zeros((), jnp.int32)
    zero = jnp.zeros_like(x)
    start = _Left(x, *_spectrum(x, how.split), limit, zero, zero, stage)
    left = lax.while_loop(is_wide, taken_out, start)
    found = coefficient(left.values, left.limit)
    # What has no square in float32 is the rounding of what was taken out.
    found = jnp.where(left.values[..., -1:] > 0, found, jnp.zeros_like(found))
    found = found[..., None, :]
    inner = product(adjoint(left.vectors), left.x)
    return left.taken + product(times(found, left.vectors), inner)


def _spectrum(x: jax.Array, split: Axes) -> tuple[jax.Array, jax.Array]:
    """The singular values in ascending order, and the vectors of the smaller side.

    What rounding leaves in place of a zero counts as zero, of which no response makes
    more.
    """
    squares, vectors = eigh(gram(x, split))
    noise = 4 * jnp.finfo(squares.dtype).eps * squares.shape[-1] ** 0.5
    known = squares > noise * squares[..., -1:]
    return root(jnp.where(known, squares, jnp.zeros_like(squares))), vectors


def _is_wide(left: _Left, unit: jax.Array) -> jax.Array:
    """Whether the Gram matrix does not resolve what is as large as a threshold."""
    return left.values[..., -1:] > _WINDOW * _lowest(left, unit)


def _lowest(left: _Left, unit: jax.Array) -> jax.Array:
    positive = jnp.where(left.limit > 0, left.limit, jnp.inf)
    return jnp.min(positive, -1, keepdims=True) / unit


def _without_largest(
    left: _Left, unit: jax.Array, coefficient: Coefficient, split: Axes
) -> _Left:
    """The matrix without the singular values that are near its largest.

    From both sides: an error of 1e-7 in a vector of one side leaves that much of the
    singular value, which may be 1000 thresholds. Each time anew what was taken out
    before, of which rounding leaves 1e-7 of what is still there.
    """
    x, values, vectors, limit, taken, isometry, stage = left
    edge = jnp.maximum(values[..., -1:] / _WINDOW, _lowest(left, unit))
    chosen = (values > edge) & _is_wide(left, unit)
    ours = jnp.where(chosen[..., None, :], vectors, jnp.zeros_like(vectors))
    rows = product(adjoint(ours), x)
    zero = jnp.zeros_like(values)
    found = jnp.where(chosen, coefficient(values, limit), zero)[..., None, :]
    taken = taken + product(times(found, ours), rows)
    others = times(1 / jnp.where(chosen, values, zero + 1)[..., None], rows)
    isometry = isometry + product(ours, others)
    rest = x - product(ours, rows)
    for _ in range(2):
        rest = rest - product(gram(isometry, split), rest)
        rest = rest - product(product(rest, adjoint(isometry), split), isometry)
    # Those that are left come after as many zeros now.
    moved = jnp.sum(chosen, -1, keepdims=True, dtype=jnp.int32)
    place = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    index = jnp.mod(place - moved, values.shape[-1])
    limit = jnp.take_along_axis(limit, index, -1)
    return _Left(rest, *_spectrum(rest, split), limit, taken, isometry, stage + 1)


@_mapped.defjvp
def _mapped_jvp(how, primals, tangents):
    """By divided differences of F, which are slopes where singular values are equal."""
    (x, unit, limit, *consts), (dx, _, dlimit, *dconsts) = primals, tangents
    values, vectors = _spectrum(x, how.split)
    found, moved = jax.jvp(
        lambda limit, *consts: how.coefficient(values * unit, limit, *consts),
        (limit, *consts), (dlimit, *dconsts),
    )  # fmt: skip
    inner, dinner = (product(adjoint(vectors), each) for each in (x, dx))
    change = times(found[..., None], dinner) + times(moved[..., None], inner)
    if not how.detached:
        _, slope = jax.jvp(
            lambda values: how.coefficient(values * unit, limit, *consts),
            (values,), (jnp.ones_like(values),),
        )  # fmt: skip
        turned = product(dinner, adjoint(inner), how.split)
        quotients = _divided_differences(values, found, slope)
        change += product(times(quotients, turned + adjoint(turned)), inner)
    return _mapped(how, *primals), product(vectors, change)


def _divided_differences(
    values: jax.Array, found: jax.Array, slope: jax.Array
) -> jax.Array:
    """The change of the coefficient by that of the square of the singular value."""
    one, other = values[..., :, None], values[..., None, :]
    gap = one**2 - other**2
    near = jnp.sqrt(jnp.finfo(values.dtype).eps) * (one + other)
    apart = jnp.abs(one - other) > near
    quotient = (found[..., :, None] - found[..., None, :]) / jnp.where(
        apart, gap, jnp.ones_like(gap)
    )
    live = values > 0
    own = jnp.where(live, slope / jnp.where(live, 2 * values, 1), 0)
    mean = (own[..., :, None] + own[..., None, :]) / 2
    return jnp.where(apart, quotient, mean)
