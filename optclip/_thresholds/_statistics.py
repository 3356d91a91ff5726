"""Statistics over all norms of a leaf, on any number of devices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _collectives

Statistic = str | float
NAMES = ("max", "mean", "median")


def statistic(reduce: Statistic, norm: jax.Array) -> jax.Array:
    """Return a statistic of norms of at least 0: a name, or the level of a quantile."""
    if not norm.ndim:
        return norm
    if not norm.size:
        return jnp.zeros((), norm.dtype)
    if reduce == "max":
        return jnp.maximum(_collectives.largest(norm), 0)
    if reduce == "mean":
        # Each norm is divided first, since the sum of many may overflow.
        return _total(norm / _count(norm))
    return _quantile(norm, 0.5 if reduce == "median" else float(reduce))


def _count(norm: jax.Array) -> int:
    """Return the number of norms on all devices."""
    return norm.size * _axis_names.axes_size(_axis_names.split_axes(norm))


def _total(x: jax.Array) -> jax.Array:
    return _collectives.reduced_over(lax.psum, jnp.sum(x, dtype=x.dtype))


def _quantile(norm: jax.Array, q: float) -> jax.Array:
    """Return the quantile, interpolated linearly, as in `numpy.quantile`."""
    place = q * (_count(norm) - 1)
    rank = math.floor(place)
    low = _of_rank(norm, rank)
    # The next larger norm, unless several equal the one of this rank.
    above = jnp.where(norm > low, norm, jnp.full_like(norm, jnp.inf))
    least = _collectives.reduced_over(lax.pmin, jnp.min(above))
    up_to_low = _total((norm <= low).astype(jnp.int32))
    high = jnp.where(up_to_low > rank + 1, low, least)
    # Infinite only if there is no next norm, where the fraction is 0.
    step = jnp.where(jnp.isfinite(high), high - low, jnp.zeros_like(low))
    return low + step * (place - rank)


def _of_rank(norm: jax.Array, rank: int) -> jax.Array:
    """Return the norm of a rank, from 0, by bisection over the bits of floats.

    Floats of at least 0 are ordered like their bit patterns. Each step counts the norms
    below a pattern, a sum that also crosses devices, where a sort would gather them.
    """
    bits = jnp.finfo(norm.dtype).bits
    whole = {32: jnp.int32, 64: jnp.int64}[bits]
    patterns = lax.bitcast_convert_type(norm, whole)

    def with_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        larger = found | (jnp.ones((), whole) << (bits - 2 - i).astype(whole))
        below = _total((patterns < larger).astype(jnp.int32))
        return jnp.where(below <= rank, larger, found)

    found = lax.fori_loop(0, bits - 1, with_bit, jnp.zeros((), whole))
    return lax.bitcast_convert_type(found, norm.dtype)
