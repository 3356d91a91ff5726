"""Cap singular values, or set them to 1, by matrix products only.

With the Gram matrix `G = x x^*` a hard cap is `c max(G, c^2)^(-1/2) x`, a smooth one
`c (G + c^2)^(-1/2) x`. The maximum is `(G + c^2 + |G - c^2|) / 2`, where the modulus of
a matrix is its product with its sign. Sign and inverse root are Newton-Schulz
iterations; each step is scaled for the interval that contains the eigenvalues at that
step.

The polar factor is `u v^*` for the singular vectors of the matrix: all singular values
become 1. Odd polynomials of degree 5, applied in turn, lead them there. Each is the
best one for the interval that contains the values at its step, and so is their
composition.

References:
  Kenney and Laub, "On Scaling Newton's Method for Polar Decomposition and the Matrix
  Sign Function", 1992.
  Chen and Chow, "A Stable Scaling of Newton-Schulz for Improving the Sign Function
  Computation of a Hermitian Matrix", 2014.
  Amsel, Persson, Musco and Gower, "The Polar Express: Optimal Matrix Sign Methods and
  Their Application to the Muon Algorithm", 2025, arXiv:2505.16932.
  Jordan et al., "Muon: An Optimizer for Hidden Layers in Neural Networks", 2024.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays._axis_names import Axes
from ._matrix_algebra import adjoint, gram, product, times

# A Gram matrix resolves singular values within this factor of the largest. Larger ones
# are capped in steps, since a cap after a higher cap equals the lower cap alone.
_WINDOW = 8.0
_STEPS = 7


def bound(x: jax.Array, split: Axes) -> jax.Array:
    """Return an upper bound on the largest singular value, `(..., 1, 1)`.

    It is the same for the Gram matrix of either side, so the layout of a mesh does not
    change it.
    """
    return bound_of_gram(gram(x, split))


def bound_of_gram(g: jax.Array) -> jax.Array:
    """Return the bound from the Gram matrix `(..., p, p)`."""
    # The gradient is stopped, since the scale cancels in every cap.
    size = lax.stop_gradient(jnp.abs(g))
    return jnp.sum(size * size, (-2, -1), keepdims=True) ** 0.25


# The function is compiled, since an eager call would compile its loops each time.
@functools.partial(jax.jit, static_argnames=("split", "is_smooth"))
def capped(
    x: jax.Array, limit: jax.Array, split: Axes, *, is_smooth: bool
) -> jax.Array:
    """Return matrices with singular values capped at `limit`, `(..., 1, 1)`."""
    top = _or_one(bound(x, split))
    # Below the lower limit all resolved values are far above the threshold, so the cap
    # at the limit is scaled by `share`. Above the upper limit almost nothing is capped.
    c = jnp.clip(limit, top * _WINDOW**-_STEPS, top * (1e3 if is_smooth else 1.0))
    share = jnp.minimum(limit / c, jnp.ones_like(c))

    def step(left: _PartlyCapped, _: None) -> tuple[_PartlyCapped, None]:
        is_wide = jnp.any(left.top > _WINDOW * left.c)
        lower = functools.partial(_lower, split=split, is_smooth=is_smooth)
        return lax.cond(is_wide, lower, lambda left: left, left), None

    left, _ = lax.scan(step, _PartlyCapped(x, c, top), length=_STEPS)
    return times(share, _cap(left, left.c, split, is_smooth=is_smooth))


class _PartlyCapped(NamedTuple):
    """Hold matrices with a bound `top`, which are still to be capped at `c`."""

    x: jax.Array
    c: jax.Array
    top: jax.Array


def _lower(left: _PartlyCapped, *, split: Axes, is_smooth: bool) -> _PartlyCapped:
    """Cap as low as the Gram matrix can resolve."""
    x, c, top = left
    # The gradient is stopped, since an intermediate cap does not change the result.
    higher = jnp.maximum(top / _WINDOW, lax.stop_gradient(c))
    wide = higher > c
    out = jnp.where(wide, _cap(left, higher, split, is_smooth=is_smooth), x)
    # A cap may leave values this far above it.
    top = jnp.where(wide, higher * (1 + 1e-4), top)
    if not is_smooth:
        return _PartlyCapped(out, c, top)
    # Consecutive smooth caps are one, whose 1 / c^2 is the sum of theirs.
    rest = 1 - (c / jnp.where(wide, higher, c * 2)) ** 2
    return _PartlyCapped(out, jnp.where(wide, c / jnp.sqrt(rest), c), top)


def _cap(
    left: _PartlyCapped, c: jax.Array, split: Axes, *, is_smooth: bool
) -> jax.Array:
    """Cap at `c`, for matrices with a bound of at most `_WINDOW * c`."""
    g = times(1 / left.top**2, gram(left.x, split))
    t = (c / left.top) ** 2
    least = times(t, _identity(g))
    if is_smooth:
        inside = times(1 / (1 + t), g + least)
        t = t / (1 + t)
    else:
        excess = g - least
        modulus = product(excess, _sign(excess))
        inside = (g + least + (modulus + adjoint(modulus)) / 2) / 2
    return product(times(jnp.sqrt(t), _inverse_root(inside)), left.x)


_STABLE = 1.7


def _scales(least: float) -> np.ndarray:
    """Return the factor of each step, for eigenvalues from `least` to 1 in modulus.

    It is the largest factor with which the step maps them into 1 again, and below the
    root of 3, which would map 1 to 0 and a rounded 1 to either side of 0.
    """
    scales = []
    while least < 1 - 1e-7:
        scale = min(np.sqrt(3 / (1 + least + least**2)), _STABLE)
        least = min(scale * least * (3 - (scale * least) ** 2) / 2, 1.0)
        scales.append(scale)
    # Second derivatives and float64 converge one step later.
    return np.array([*scales, 1.0])


# An eigenvalue nearer to zero may get the wrong sign, which changes a singular value
# this near to its threshold by 1e-5 of it.
_SIGN = _scales(6e-7)
# `_cap` takes inverse roots of eigenvalues of at least 1 / (_WINDOW**2 + 1): of
# (g + t) / (1 + t) for smooth caps, where t is at least 1 / _WINDOW**2. The iteration
# maps the roots of eigenvalues as that of `_sign` maps moduli.
_ROOT = _scales((_WINDOW**2 + 1) ** -0.5)


def _identity(like: jax.Array) -> jax.Array:
    one = jnp.eye(like.shape[-1], dtype=like.dtype)
    return jnp.zeros_like(like) + jnp.expand_dims(one, range(like.ndim - 2))


def _sign(a: jax.Array) -> jax.Array:
    def step(s: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        s = s * scale
        return (3 * s - product(s, product(s, s))) / 2, None

    return lax.scan(step, a, jnp.asarray(_SIGN, a.dtype))[0]


def _inverse_root(a: jax.Array) -> jax.Array:
    """Return the inverse root of a matrix with eigenvalues from 1/65 to 1.

    The iteration computes the root and the inverse root together.
    """
    one = _identity(a)

    def step(
        pair: tuple[jax.Array, jax.Array], scale: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        root, inverse = pair
        factor = (3 * one - scale**2 * product(inverse, root)) * (scale / 2)
        return (product(root, factor), product(factor, inverse)), None

    return lax.scan(step, (a, one), jnp.asarray(_ROOT, a.dtype))[0][1]


# Seven steps lead values from here to 1, as fractions of the Schatten 8-norm, to within
# 3e-5 of 1. The norm is at most the eighth root of the smaller side times the largest.
_POLAR_LEAST = 4e-4
_POLAR_STEPS = 7

# Polynomials are steep above their interval, where rounding may carry a value.
_MARGIN = 1 + 1e-5

_SIGNS = (1.0, -1.0, 1.0, -1.0)

# The limit of the best polynomials for intervals around 1.
_LAST = (15 / 8, -10 / 8, 3 / 8)


@functools.cache
def _quintics() -> np.ndarray:
    """Return the coefficients of `x`, `x^3` and `x^5` per step, `(steps, 3)`."""
    low, high, rows = _POLAR_LEAST, 1.0, []
    for _ in range(_POLAR_STEPS):
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


# The derivative of the composed polynomials oscillates.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar_factor(x: jax.Array, split: Axes) -> jax.Array:
    """Return matrices with all singular values 1, and singular values of 0 kept."""
    return _converging(x, split)


@_polar_factor.defjvp
def _polar_factor_jvp(
    split: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Differentiate two more steps, which are flat around 1."""
    y, dy = jax.jvp(lambda x: _converging(x, split), primals, tangents)

    def converged(y: jax.Array) -> jax.Array:
        return _polar_step(_polar_step(y, _LAST, split), _LAST, split)

    return y, jax.jvp(converged, (y,), (dy,))[1]


# Compiled, since an eager call would compile its loop each time.
polar_factor = jax.jit(_polar_factor, static_argnums=1)


def _converging(x: jax.Array, split: Axes) -> jax.Array:
    def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return _polar_step(x, row, split), None

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


def _polar_step(
    x: jax.Array, row: jax.Array | tuple[float, float, float], split: Axes
) -> jax.Array:
    a, b, c = row
    g = gram(x, split)
    return a * x + product(b * g + c * product(g, g), x)
