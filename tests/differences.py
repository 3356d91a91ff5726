"""Derivatives of a clip by JAX, and the same by central differences in NumPy.

Both sides take a function from a vector to the clipped vector. A loss, linear and
quadratic in the output, makes of it something to differentiate twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STEP = 1e-3


class Derivatives(NamedTuple):
    """First and second order, forwards and backwards.

    Attributes:
      tangent: the change of the output along a direction.
      slope: the gradient of the loss.
      forward: the change of that gradient along the direction, forwards over reverse.
      reverse: the same, reverse over reverse.
    """

    tangent: Any
    slope: Any
    forward: Any
    reverse: Any


def weights(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(42)
    return rng.uniform(0.5, 1.5, size), rng.uniform(-1.5, -0.5, size)


def loss(y: Any) -> Any:
    """Of a clipped vector, NumPy's or JAX's, each element weighted by its own."""
    linear, quadratic = weights(y.size)
    if isinstance(y, jax.Array):
        linear, quadratic = (jnp.asarray(w, y.dtype) for w in (linear, quadratic))
    return (linear * y + 0.5 * quadratic * y * y).sum()


def by_jax(clip: Callable[[Any], Any], x: Any, along: Any) -> Derivatives:
    """Of all orders and modes, to be put under jit and vmap."""
    slope_of = jax.grad(lambda x: loss(clip(x)))
    slope, forward = jax.jvp(slope_of, (x,), (along,))
    return Derivatives(
        tangent=jax.jvp(clip, (x,), (along,))[1],
        slope=slope,
        forward=forward,
        reverse=jax.grad(lambda x: jnp.vdot(slope_of(x), along))(x),
    )


def by_differences(
    clip: Callable[[np.ndarray], np.ndarray], x: np.ndarray, along: np.ndarray
) -> Derivatives:
    """Each coordinate is moved by a share of its size, or of the largest if it is 0."""
    unit = sizes(x)

    def of_loss(x: np.ndarray) -> float:
        return loss(clip(x))

    def tilt(x: np.ndarray) -> float:
        return slope_along(of_loss, x, along)

    slope = [slope_along(of_loss, x, move) for move in np.diag(unit)] / unit
    curve = [slope_along(tilt, x, move) for move in np.diag(unit)] / unit
    return Derivatives(slope_along(clip, x, along), slope, curve, curve)


def slope_along(function: Callable[[Any], Any], x: Any, along: Any) -> Any:
    """The derivative of `function` at `x` along a direction, to fourth order."""

    def central(step: float) -> Any:
        ahead, behind = function(x + step * along), function(x - step * along)
        return (ahead - behind) / (2 * step)

    return (4 * central(STEP) - central(2 * STEP)) / 3


def sizes(x: np.ndarray) -> np.ndarray:
    """The size of each coordinate; the largest of all for those that are 0."""
    return np.where(x == 0, np.max(np.abs(x), initial=0.0) or 1.0, np.abs(x))


def assert_close(found: Any, expected: Any, what: str) -> None:
    """Within 5e-6 of the largest entry, which is what the differences are good for."""
    size = np.max(np.abs(expected), initial=1e-2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * size, err_msg=what)
