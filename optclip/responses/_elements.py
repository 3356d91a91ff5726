"""Responses made for single elements: curves that bend towards the threshold."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from optclip import _collectives, _validate
from optclip._arithmetic import ratio, share, spread


def _by_curve(
    norm: jax.Array,
    threshold: jax.Array,
    curve: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The coefficient that takes a norm of r thresholds to `curve(r)` of them."""
    one = jnp.ones_like(norm)
    off = (norm == 0) | jnp.isinf(threshold)
    live = ~off & (threshold > 0)
    share = ratio(jnp.where(live, norm, one), jnp.where(live, threshold, one))
    # A threshold of 0 or NaN is the coefficient itself.
    edge = jnp.where(off, one, threshold)
    # So far below the threshold every curve is straight.
    share = jnp.maximum(share, 2.0**-40)
    return jnp.where(live, curve(share) / share, edge)


@dataclasses.dataclass(frozen=True)
class Tanh:
    r"""Bend to the threshold, :math:`c \tanh(n / c)`: always below it.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0, response="tanh")
      >>> updates = jnp.array([-3.0, 0.1, 1.0])
      >>> print(*(f"{x:.3f}" for x in tx.update(updates, tx.init(updates))[0]))
      -0.995 0.100 0.762
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        return _by_curve(norm, threshold, jnp.tanh)


@dataclasses.dataclass(frozen=True)
class MuLaw:
    r"""Compress as telephones do, :math:`c \ln(1 + \mu n / c) / \ln(1 + \mu)`.

    What is at the threshold stays, what is above it grows with its logarithm only, and
    what is far below is multiplied by up to :math:`\mu / \ln(1 + \mu)`, 26 for 127.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0, response="mu_law")
      >>> updates = jnp.array([-100.0, 0.01, 1.0])
      >>> print(*(f"{x:.3f}" for x in tx.update(updates, tx.init(updates))[0]))
      -1.948 0.169 1.000
    """

    mu: float = 127.0

    def __post_init__(self) -> None:
        _validate.plain("mu", self.mu, above=True)

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        mu = jnp.asarray(self.mu).astype(norm.dtype)

        def curve(share: jax.Array) -> jax.Array:
            # The logarithm in two parts: their product may be out of range.
            small = jnp.minimum(share, 2.0**60)
            return (jnp.log1p(mu * small) + jnp.log(share / small)) / jnp.log1p(mu)

        return _by_curve(norm, threshold, curve)


@dataclasses.dataclass(frozen=True)
class Proportional:
    r"""Scale all elements past the threshold by one factor, that of the largest.

    .. math:: k_i = c / \max_j n_j \text{ if } n_i > c \text{, else } 1

    Elements past the threshold keep their proportions, and may come out below others
    that are not past it. Made for `ELEMENT` scope, by leaf.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0, response="proportional")
      >>> updates = jnp.array([-4.0, 0.5, 2.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  0.5]

    Source: Huang, Hu, et al., *Stable-SPAM: How to Train in 4-Bit More Stably than
    16-Bit Adam*, 2025, arXiv:2502.17055.
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        one = jnp.ones_like(norm)
        past = ~(norm <= threshold)
        peak = spread(_collectives.largest(norm), norm)
        return jnp.where(past, ratio(threshold, jnp.where(past, peak, one)), one)

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Elements past their bound to its share that they are of the largest."""
        size = jnp.abs(x)
        limit = jnp.where(x < 0, -lower, upper)
        finite = jnp.isfinite(size)
        known = jnp.where(finite, size, jnp.zeros_like(size))
        part = share(known, _collectives.largest(known))
        # What is infinite goes to its bound.
        part = jnp.where(finite, part, jnp.ones_like(part))
        moved = jnp.where(x < 0, -limit, limit) * part
        loud = jnp.isnan(limit)
        return jnp.where((size > limit) | loud, jnp.where(loud, limit, moved), x)
