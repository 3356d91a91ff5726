"""Derivatives of a clip by JAX, and the same by central differences in NumPy.

Both sides take a function from a vector to the clipped vector. A loss, linear and
quadratic in the output, makes of it something to differentiate twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
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
      by_numbers: the derivative of the loss by each further argument of the clip.
    """

    tangent: Any
    slope: Any
    forward: Any
    reverse: Any
    by_numbers: Any = ()


# What the two sides have in common.
OF_UPDATES = Derivatives._fields[:4]


def weights(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(42)
    return rng.uniform(0.5, 1.5, size), rng.uniform(-1.5, -0.5, size)


def loss(y: np.ndarray) -> Any:
    """Of a clipped vector, each element weighted by its own."""
    linear, quadratic = weights(y.size)
    return (linear * y + 0.5 * quadratic * y * y).sum()


def by_jax(
    clip: Callable[..., Any], x: chex.Array, along: chex.Array, *numbers: chex.Numeric
) -> Derivatives:
    """Of all orders and modes, to be put under jit and vmap.

    The clip is traced once: what runs forwards over reverse and, transposed, reverse
    over reverse is one linear program.
    """

    def both(x: Any) -> Any:
        y, pull = jax.vjp(clip, x, *numbers)
        linear, quadratic = (jnp.asarray(w, y.dtype) for w in weights(y.size))
        slope, *by_numbers = pull(linear + quadratic * y)
        return (y, slope), by_numbers

    (y, slope), push, by_numbers = jax.linearize(both, x, has_aux=True)
    tangent, forward = push(along)
    (reverse,) = jax.linear_transpose(push, x)((jnp.zeros_like(y), along))
    return Derivatives(tangent, slope, forward, reverse, by_numbers)


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
