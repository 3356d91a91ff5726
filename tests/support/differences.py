"""Differentiate clipping with JAX, and by central differences in NumPy.

Both take a function from a vector to the clipped vector. A linear and quadratic loss of
the output makes second derivatives nonzero.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

STEP = 1e-3
# The directional derivative of the output, the gradient of the loss, and the Hessian-
# vector product of the loss, in two modes: forward over reverse, reverse over reverse.
PARTS = ("tangent", "slope", "forward", "reverse")


def weights(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(42)
    return rng.uniform(0.5, 1.5, size), rng.uniform(-1.5, -0.5, size)


def loss(y: np.ndarray) -> Any:
    """Compute the loss of a clipped vector."""
    linear, quadratic = weights(y.size)
    return (linear * y + 0.5 * quadratic * y * y).sum()


def by_jax(
    clip: Callable[..., Any], x: chex.Array, along: chex.Array, *numbers: chex.Numeric
) -> tuple[dict[str, Any], Any]:
    """Return `PARTS`, and the derivative of the loss by each further argument.

    Works under jit and vmap. Clipping is traced once: forward over reverse is a linear
    program, whose transpose is reverse over reverse.
    """

    def both(x: Any) -> Any:
        y, pull = jax.vjp(clip, x, *numbers)
        linear, quadratic = (jnp.asarray(w, y.dtype) for w in weights(y.size))
        slope, *by_numbers = pull(linear + quadratic * y)
        return (y, slope), by_numbers

    (y, slope), push, by_numbers = jax.linearize(both, x, has_aux=True)
    tangent, forward = push(along)
    (reverse,) = jax.linear_transpose(push, x)((jnp.zeros_like(y), along))
    parts = (tangent, slope, forward, reverse)
    return dict(zip(PARTS, parts, strict=True)), by_numbers


def by_differences(
    clip: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    along: np.ndarray,
    second: bool = True,
) -> dict[str, Any]:
    """Return `PARTS` by central differences, with steps relative to each coordinate."""
    unit = sizes(x)

    def of_loss(x: np.ndarray) -> float:
        return loss(clip(x))

    def tilt(x: np.ndarray) -> float:
        return slope_along(of_loss, x, along)

    slope = [slope_along(of_loss, x, move) for move in np.diag(unit)] / unit
    curve = None
    if second:
        curve = [slope_along(tilt, x, move) for move in np.diag(unit)] / unit
    parts = (slope_along(clip, x, along), slope, curve, curve)
    return dict(zip(PARTS, parts, strict=True))


def slope_along(function: Callable[[Any], Any], x: Any, along: Any) -> Any:
    """Return the directional derivative of `function` at `x`, to fourth order."""

    def central(step: float) -> Any:
        after, before = function(x + step * along), function(x - step * along)
        return (after - before) / (2 * step)

    return (4 * central(STEP) - central(2 * STEP)) / 3


def sizes(x: np.ndarray) -> np.ndarray:
    """Return the size of each coordinate; for zeros, the largest size."""
    return np.where(x == 0, np.max(np.abs(x), initial=0.0) or 1.0, np.abs(x))


def assert_close(actual: Any, expected: Any, what: str) -> None:
    """Compare to within 5e-6 of the largest entry, the accuracy of the differences."""
    size = np.max(np.abs(expected), initial=1e-2)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6 * size, err_msg=what)
