"""Respond to single elements: smooth saturation, and scaling by the largest."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from optclip._arrays import _collectives
from optclip._arrays._numerics import broadcast_like, fraction_of_peak, ratio


@dataclasses.dataclass(frozen=True)
class Tanh:
    """Scale to `c * tanh(n / c)`, which never exceeds the threshold c.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0, response="tanh")
      >>> updates = jnp.array([-3.0, 0.1, 1.0])
      >>> print(*(f"{x:.3f}" for x in tx.update(updates, tx.init(updates))[0]))
      -0.995 0.100 0.762
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        one = jnp.ones_like(norm)
        untouched = (norm == 0) | jnp.isinf(threshold)
        is_curved = ~untouched & (threshold > 0)
        multiple = ratio(
            jnp.where(is_curved, norm, one), jnp.where(is_curved, threshold, one)
        )
        # Below 2**-40 tanh(x) / x rounds to 1; the lower limit prevents 0 / 0.
        multiple = jnp.maximum(multiple, 2.0**-40)
        # At a threshold of 0 the coefficient is 0, at NaN it is NaN.
        edge = jnp.where(untouched, one, threshold)
        return jnp.where(is_curved, jnp.tanh(multiple) / multiple, edge)


@dataclasses.dataclass(frozen=True)
class Proportional:
    """Scale all elements above the threshold by one factor, set by the largest.

    The coefficient is `c / max(n)` if `n > c`, and 1 otherwise, with the maximum over
    the leaf. Elements above the threshold keep their proportions and may become smaller
    than others below it. Designed for `clip_by_value`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0, response="proportional")
      >>> updates = jnp.array([-4.0, 0.5, 2.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  0.5]

    References:
      Huang, Hu, et al., "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit
      Adam", 2025, arXiv:2502.17055.
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        one = jnp.ones_like(norm)
        past = ~(norm <= threshold)
        # A norm that is not finite follows its policy, and sets no factor for others.
        finite_norm = jnp.where(jnp.isfinite(norm), norm, jnp.zeros_like(norm))
        peak = broadcast_like(_collectives.largest(finite_norm), norm)
        return jnp.where(past, ratio(threshold, jnp.where(past, peak, one)), one)

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return elements outside the bounds in proportion to the largest element."""
        del lower  # Bounds are symmetric here.
        size, limit = jnp.abs(x), upper
        finite = jnp.isfinite(size)
        finite_size = jnp.where(finite, size, jnp.zeros_like(size))
        proportion = fraction_of_peak(finite_size, _collectives.largest(finite_size))
        # An infinite element is set to its bound.
        proportion = jnp.where(finite, proportion, jnp.ones_like(proportion))
        moved = jnp.where(x < 0, -limit, limit) * proportion
        # A NaN bound makes the element NaN, so that the error is visible.
        is_nan = jnp.isnan(limit)
        return jnp.where((size > limit) | is_nan, jnp.where(is_nan, limit, moved), x)
