"""Respond to norms: scale them down, smooth, normalize or drop them."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from optclip._arrays import _validate
from optclip._arrays._numerics import power, ratio, select
from optclip._arrays._types import Number


class Response(Protocol):
    """Compute the coefficient of a norm from the norm and its threshold."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array, /) -> Number: ...


@dataclasses.dataclass(frozen=True)
class Hard:
    """Scale down to the threshold: `min(1, c / n)`. The default.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.Hard().coefficient(jnp.float32(4.0), jnp.float32(1.0)))
      0.25
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        # A NaN threshold makes this False and the quotient NaN, so that it is visible.
        inside = norm <= threshold
        one = jnp.ones_like(norm)
        return select(inside, one, ratio(threshold, select(inside, one, norm)))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return `x` clipped exactly to the bounds; `lower` where `lower > upper`."""
        upper = jnp.where(upper < lower, lower, upper)
        clipped = jnp.where(x < lower, lower, jnp.where(x > upper, upper, x))
        # The bounds are in order unless one is NaN, which the maximum returns.
        return jnp.where(lower <= upper, clipped, jnp.maximum(lower, upper))


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Scale smoothly to below the threshold c: `(1 + (n / c) ** s) ** (-1 / s)`.

    With s = 2 the norm after clipping is `n / sqrt(1 + (n / c) ** 2)`, with s = 1
    `n / (1 + n / c)`; large s approach `Hard`. Norms below the threshold shrink too, by
    a fraction of about `(n / c) ** s / s`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.Smooth().coefficient(jnp.float32(3.0), jnp.float32(4.0)))
      0.8

    Args:
      sharpness: The exponent s, a finite number above 0. Default: 2.
    """

    sharpness: float = 2.0

    def __post_init__(self) -> None:
        _validate.plain("sharpness", self.sharpness, above=True)

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        s = self.sharpness
        inside = norm <= threshold
        one, zero = jnp.ones_like(norm), jnp.zeros_like(norm)
        # Powers of a ratio of at most 1 cannot overflow. 0 / 0 is replaced before the
        # division, since a NaN in the unselected branch makes the derivative NaN.
        live = inside & (norm > 0)
        below = jnp.where(live, ratio(norm, jnp.where(live, threshold, one)), zero)
        above = jnp.where(inside, one, ratio(threshold, jnp.where(inside, one, norm)))
        small = jnp.where(live, (1 + power(below, s)) ** (-1 / s), one)
        return jnp.where(inside, small, above * (1 + power(above, s)) ** (-1 / s))


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Scale to the threshold, up or down: `c / n`. Zeros stay zeros.

    A threshold beyond the range of a leaf's dtype overflows in that leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.Normalize().coefficient(jnp.float32(0.5), jnp.float32(1.0)))
      2.0
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        untouched = (norm == 0) | jnp.isinf(threshold)
        one = jnp.ones_like(norm)
        wanted = ratio(threshold, jnp.where(untouched, one, norm))
        # An infinite coefficient would make zeros NaN.
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        return jnp.where(untouched, one, jnp.minimum(wanted, largest))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return the bound on the side of each element; zeros stay zeros."""
        bound = jnp.where(x < 0, lower, jnp.where(x > 0, upper, x))
        return jnp.where(jnp.isinf(bound), x, bound)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Drop norms above the threshold: 0 if `n > c`, else 1.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(1.0, response="drop")
      >>> updates = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'b': Array([0.5], dtype=float32), 'w': Array([0., 0.], dtype=float32)}
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        past = jnp.where(jnp.isnan(threshold), threshold, jnp.zeros_like(norm))
        return jnp.where(norm <= threshold, jnp.ones_like(norm), past)

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return 0 in place of elements outside the bounds."""
        # A NaN bound makes elements NaN, so that the error is visible.
        bound = jnp.where(jnp.isnan(lower), lower, upper)
        outside = jnp.where(jnp.isnan(bound), bound, jnp.zeros_like(x))
        return jnp.where((x >= lower) & (x <= upper), x, outside)
