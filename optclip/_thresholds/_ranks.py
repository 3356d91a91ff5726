"""Find numbers by their rank, without sorting."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_Reduce = Callable[[jax.Array], jax.Array]


def neighbors(
    x: jax.Array,
    rank: jax.Array | int,
    total: _Reduce,
    least: _Reduce,
    along: _Reduce = lambda number: number,
    *,
    signed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the number of a rank, from 0, and the next one in their order.

    Bisection determines one bit per step. Each step counts the numbers below a pattern,
    a sum that may cross devices, where a sort would gather the numbers.

    Args:
      x: Finite numbers.
      rank: Rank of the first result.
      total: Sums the counts of a set of numbers; `least` takes its minimum.
      along: Broadcasts one number per set to the shape of `x`.
      signed: Whether `x` may be negative, which takes one more count.

    Returns:
      Two numbers per set. The second is inf after the largest.
    """
    bits = jnp.finfo(x.dtype).bits
    whole = jnp.dtype(f"int{bits}")
    # Both zeros have one pattern, as they are equal in a sort.
    nonzero = jnp.where(x == 0, jnp.zeros_like(x), x)
    patterns = _flipped(lax.bitcast_convert_type(nonzero, whole))

    def below(pattern: jax.Array) -> jax.Array:
        return total((patterns < along(pattern)).astype(jnp.int32))

    def with_bit(i: jax.Array | int, found: jax.Array) -> jax.Array:
        larger = found ^ (jnp.ones((), whole) << jnp.asarray(bits - 1 - i, whole))
        return jnp.where(below(larger) <= rank, larger, found)

    found = jnp.zeros((), whole)
    if signed:
        found = with_bit(0, found + jnp.iinfo(whole).min)
    found = lax.fori_loop(1, bits, with_bit, found)
    low = lax.bitcast_convert_type(_flipped(found), x.dtype)
    # The next larger number, unless several equal the one of this rank.
    above = least(jnp.where(x > along(low), x, jnp.full_like(x, jnp.inf)))
    up_to_low = total((x <= along(low)).astype(jnp.int32))
    return low, jnp.where(up_to_low > rank + 1, low, above)


def _flipped(bits: jax.Array) -> jax.Array:
    """Reverse the order of negative numbers, whose bits grow with the modulus."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
