"""A function of the singular values of a matrix, its singular vectors as they are.

That of the eigenvalues of the Gram matrix, `F = u k u^*`, times the matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _closures
from optclip._arrays._axis_names import Axes
from optclip.spectral._factorization import Factors, change_of_squares, factors, gaps
from optclip.spectral._matrix_blocks import (
    Factored,
    adjoint,
    product,
    singular_values_of,
    times,
)

# (singular values, thresholds) -> coefficients, all of them (..., p).
Coefficient = Callable[[jax.Array, jax.Array], jax.Array]


def mapped(
    factored: Factored, limit: jax.Array, coefficient: Coefficient, *, detached: bool
) -> jax.Array:
    """Each matrix with each singular value times its coefficient, in its `unit`.

    `detached`, the coefficients are constants to `jax.grad`.
    """
    matrices, squares, vectors = factored
    if squares is None or vectors is None:
        coefficients = coefficient(singular_values_of(factored), limit)[..., None]
        return times(coefficients, matrices.x)
    unit = matrices.unit[..., 0]
    # Beyond the smaller side of a matrix there are zeros, at whatever threshold.
    beyond = matrices.x.shape[-2] - limit.shape[-1]
    limit = jnp.pad(limit, [*[(0, 0)] * (limit.ndim - 1), (beyond, 0)], mode="edge")
    # The rule below runs later and differentiates by the arrays that the coefficient
    # closes over, such as the value of a schedule, so it needs them as arguments.
    function, consts = _closures.converted(coefficient, limit, limit)
    how = _How(function, matrices.split, detached)
    lowest = _lowest(limit, unit)
    decomposition = factors(matrices.split, matrices.x, lowest, squares, vectors)
    return _mapped(how, decomposition, matrices.x, unit, limit, *consts)


def _lowest(limit: jax.Array, unit: jax.Array) -> jax.Array:
    """The lowest threshold above 0 of each matrix, in its unit, `(..., 1)`."""
    # A threshold of 0 makes all values 0, whatever their accuracy.
    positive = jnp.where(limit > 0, limit, jnp.inf)
    return jnp.min(positive, -1, keepdims=True) / unit


class _How(NamedTuple):
    """The function of a mapping, and what else is fixed while tracing."""

    coefficient: Callable[..., jax.Array]
    split: Axes
    detached: bool


# Derivatives by the factors do not exist where singular values are equal.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mapped(
    how: _How,
    factored: Factors,
    x: jax.Array,
    unit: jax.Array,
    limit: jax.Array,
    *consts: Any,
) -> jax.Array:
    coefficients = how.coefficient(factored.values * unit, limit, *consts)
    return product(factored.vectors, times(coefficients[..., None], factored.rows))


@_mapped.defjvp
def _mapped_jvp(how, primals, tangents):
    """By divided differences of F, which are slopes where singular values are equal.

    By that of x, not of its factors, which have none there.
    """
    factored, _, unit, limit, *consts = primals
    _, dx, _, dlimit, *dconsts = tangents

    def coefficient(values, limit, *consts):
        return how.coefficient(values * unit, limit, *consts)

    by_limit = functools.partial(coefficient, factored.values)
    coefficients, moved = jax.jvp(by_limit, (limit, *consts), (dlimit, *dconsts))
    inner = product(adjoint(factored.vectors), dx)
    change = times(coefficients[..., None], inner)
    change += times(moved[..., None], factored.rows)
    if not how.detached:
        _, slope = jax.jvp(
            lambda values: coefficient(values, limit, *consts),
            (factored.values,), (jnp.ones_like(factored.values),),
        )  # fmt: skip
        quotients = _divided_differences(factored.values, coefficients, slope)
        turned = times(quotients, change_of_squares(factored, inner, how.split))
        change += product(turned, factored.rows)
    return _mapped(how, *primals), product(factored.vectors, change)


def _divided_differences(
    values: jax.Array, coefficients: jax.Array, slope: jax.Array
) -> jax.Array:
    """The change of the coefficient by that of the square of the singular value."""
    apart, gap = gaps(values)
    quotient = (coefficients[..., :, None] - coefficients[..., None, :]) / gap
    # A singular value of 0 counts as having no slope, so that nothing divides by it.
    live = values > 0
    slope_by_square = jnp.where(live, slope / jnp.where(live, 2 * values, 1), 0)
    # Where two singular values are equal, the quotient is the slope.
    mean = (slope_by_square[..., :, None] + slope_by_square[..., None, :]) / 2
    return jnp.where(apart, quotient, mean)
