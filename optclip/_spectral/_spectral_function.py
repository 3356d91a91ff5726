"""Apply a function to the singular values of a matrix, with its singular vectors.

The result is the matrix times a function of its Gram matrix, `F = u k u^*`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _closures
from .._arrays._axis_names import Axes
from ._factorization import Factors, change_of_squares, factors, gaps
from ._matrix_algebra import adjoint, product, times
from ._matrix_blocks import Factored, singular_values_of

# (singular values, thresholds) -> coefficients, all of them (..., p).
Coefficient = Callable[[jax.Array, jax.Array], jax.Array]

# The differentiable arguments of `_mapped`, or their tangents.
_Arguments = tuple[Factors, jax.Array, jax.Array, jax.Array, *tuple[jax.Array, ...]]


def mapped(
    factored: Factored, limit: jax.Array, coefficient: Coefficient, *, detached: bool
) -> jax.Array:
    """Return each matrix with each singular value times its coefficient, in its `unit`.

    If `detached`, the coefficients are constants to `jax.grad`.
    """
    matrices, squares, vectors = factored
    if squares is None or vectors is None:
        coefficients = coefficient(singular_values_of(factored), limit)[..., None]
        return times(coefficients, matrices.x)
    unit = matrices.unit[..., 0]
    # Singular values beyond the smaller side are zero, so any threshold fits them.
    beyond = matrices.x.shape[-2] - limit.shape[-1]
    limit = jnp.pad(limit, [*[(0, 0)] * (limit.ndim - 1), (beyond, 0)], mode="edge")
    # The rule below runs later and differentiates with respect to the arrays that the
    # coefficient closes over, such as the value of a schedule, so they are arguments.
    function, consts = _closures.converted(coefficient, limit, limit)
    how = _How(function, matrices.split, detached)
    lowest = _lowest(limit, unit)
    decomposition = factors(matrices.split, matrices.x, lowest, squares, vectors)
    return _mapped(how, decomposition, matrices.x, unit, limit, *consts)


def _lowest(limit: jax.Array, unit: jax.Array) -> jax.Array:
    """Return the lowest positive threshold of each matrix, in its unit, `(..., 1)`."""
    # A threshold of 0 makes all values 0, whatever their accuracy.
    positive = jnp.where(limit > 0, limit, jnp.inf)
    return jnp.min(positive, -1, keepdims=True) / unit


class _How(NamedTuple):
    """Hold the function of a mapping, and its other static arguments."""

    coefficient: Callable[..., jax.Array]
    split: Axes
    detached: bool


# The derivative is written for x, since factors have none at equal singular values.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mapped(
    how: _How,
    factored: Factors,
    x: jax.Array,
    unit: jax.Array,
    limit: jax.Array,
    *consts: jax.Array,
) -> jax.Array:
    coefficients = how.coefficient(factored.values * unit, limit, *consts)
    return product(factored.vectors, times(coefficients[..., None], factored.rows))


@_mapped.defjvp
def _mapped_jvp(
    how: _How, primals: _Arguments, tangents: _Arguments
) -> tuple[jax.Array, jax.Array]:
    """Differentiate by divided differences of F, or by its slope at equal values.

    The tangent of x enters directly, since its factors have none at equal values.
    """
    factored, _, unit, limit, *consts = primals
    _, dx, _, dlimit, *dconsts = tangents

    def coefficient(
        values: jax.Array, limit: jax.Array, *consts: jax.Array
    ) -> jax.Array:
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
    """Return the change of each coefficient per change of the squared values."""
    apart, gap = gaps(values)
    quotient = (coefficients[..., :, None] - coefficients[..., None, :]) / gap
    # A singular value of 0 counts as having no slope, so that nothing divides by it.
    live = values > 0
    slope_by_square = jnp.where(live, slope / jnp.where(live, 2 * values, 1), 0)
    # Where two singular values are equal, the quotient is the slope.
    mean = (slope_by_square[..., :, None] + slope_by_square[..., None, :]) / 2
    return jnp.where(apart, quotient, mean)
