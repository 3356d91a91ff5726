"""Compute the polar factor of a matrix by matrix products only.

It is `u v^*` for the singular vectors of the matrix: all singular values become 1. Odd
polynomials of degree 5, applied in turn, lead them there. Each is the best one for the
interval that contains the values at its step, and so is their composition.

References:
  Amsel, Persson, Musco and Gower, "The Polar Express: Optimal Matrix Sign Methods and
  Their Application to the Muon Algorithm", 2025, arXiv:2505.16932.
  Jordan et al., "Muon: An Optimizer for Hidden Layers in Neural Networks", 2024.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays._axis_names import Axes
from ._matrix_algebra import gram, product, times
from ._newton_schulz import bound_of_gram

# Seven steps lead values from here to 1, as fractions of the Schatten 8-norm, to within
# 3e-5 of 1. The norm is at most the eighth root of the smaller side times the largest.
_LEAST = 4e-4
_STEPS = 7

# Polynomials are steep above their interval, where rounding may carry a value.
_MARGIN = 1 + 1e-5

_SIGNS = (1.0, -1.0, 1.0, -1.0)

# The limit of the best polynomials for intervals around 1.
_LAST = (15 / 8, -10 / 8, 3 / 8)


@functools.cache
def _quintics() -> np.ndarray:
    """Return the coefficients of `x`, `x^3` and `x^5` per step, `(steps, 3)`."""
    low, high, rows = _LEAST, 1.0, []
    for _ in range(_STEPS):
        *row, error = _quintic(low, high * _MARGIN)
        low, high = 1 - error, 1 + error
        rows.append(row)
    return np.array(rows)


def _quintic(low: float, high: float) -> np.ndarray:
    """Return the odd quintic closest to 1 on an interval, and its largest error.

    The error has this size and alternating signs at four points: both ends and the two
    extrema between them. The Remez algorithm finds these in a few rounds.
    """
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    fit = np.zeros(4)
    for _ in range(12):
        x = np.array([low, *inner, high])
        fit = np.linalg.solve(np.stack([x, x**3, x**5, _SIGNS], 1), np.ones(4))
        a, b, c, _ = fit
        # The squares of the extrema are the roots of a + 3 b t + 5 c t^2.
        root = np.sqrt(9 * b**2 - 20 * a * c)
        inner = np.sqrt((-3 * b - root) / (10 * c)), np.sqrt((-3 * b + root) / (10 * c))
    return fit


# The function is compiled, since an eager call would compile its loop each time.
@functools.partial(jax.jit, static_argnums=1)
def polar_factor(x: jax.Array, split: Axes) -> jax.Array:
    """Return matrices with all singular values 1, and singular values of 0 kept."""
    return _polar_factor(x, split)


# The derivative of the composed polynomials oscillates.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar_factor(x: jax.Array, split: Axes) -> jax.Array:
    return _converging(x, split)


@_polar_factor.defjvp
def _polar_factor_jvp(
    split: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Differentiate two more steps, which are flat around 1."""
    y, dy = jax.jvp(lambda x: _converging(x, split), primals, tangents)

    def converged(y: jax.Array) -> jax.Array:
        return _step(_step(y, _LAST, split), _LAST, split)

    return y, jax.jvp(converged, (y,), (dy,))[1]


def _converging(x: jax.Array, split: Axes) -> jax.Array:
    def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return _step(x, row, split), None

    rows = jnp.asarray(_quintics()[1:], x.dtype)
    return lax.scan(step, _first_step(x, split), rows)[0]


def _first_step(x: jax.Array, split: Axes) -> jax.Array:
    """Divide by the Schatten 8-norm, which the products of the step contain."""
    g = gram(x, split)
    top = _or_one(bound_of_gram(g))
    g = times(1 / top**2, g)
    square = product(g, g)
    # The 4-norm of the Gram matrix is the square of the 8-norm.
    norm = _or_one(bound_of_gram(square)) ** 0.5
    a, b, c = (float(k) for k in _quintics()[0])
    inside = times(b / norm**3, g) + times(c / norm**5, square)
    x = times(1 / top, x)
    return times(a / norm, x) + product(inside, x)


def _or_one(norm: jax.Array) -> jax.Array:
    """Return a norm; 1 for a matrix of zeros, which is divided by it."""
    return jnp.where(norm > 0, norm, jnp.ones_like(norm))


def _step(
    x: jax.Array, row: jax.Array | tuple[float, float, float], split: Axes
) -> jax.Array:
    a, b, c = row
    g = gram(x, split)
    return a * x + product(b * g + c * product(g, g), x)
