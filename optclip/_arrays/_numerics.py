"""Quotients, roots and counts that keep their range, and their derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names


def select(where: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """`jnp.where`, of arrays of one type without its nested function."""
    if (
        where.shape in ((), yes.shape)
        and yes.shape == no.shape
        and yes.dtype == no.dtype
    ):
        return lax.select(where, yes, no)
    return jnp.where(where, yes, no)


def lost(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """What the rounding of `total = a + b` left out, exactly (Knuth 1969)."""
    other = total - a
    return (a - (total - other)) + (b - other)


@jax.custom_jvp
def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, with a derivative that never squares `b`, which may leave the range."""
    return a / b


@ratio.defjvp
def _ratio_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    found = ratio(a, b)
    # By a power of two near b first, a constant: when this is differentiated again it
    # squares what is left. 4 / b and b both stay in range then.
    _, exponent = jnp.frexp(lax.stop_gradient(b))
    shrink = jnp.ldexp(jnp.ones_like(b), 2 - exponent)
    return found, ((da - found * db) * shrink) / (b * shrink)


def over(x: jax.Array, real: jax.Array) -> jax.Array:
    """`x` divided by a real array, part by part if it is complex."""
    if jnp.iscomplexobj(x):
        return lax.complex(ratio(jnp.real(x), real), ratio(jnp.imag(x), real))
    return ratio(x, real)


def root(x: jax.Array) -> jax.Array:
    """The square root of what is not negative, with a derivative of 0 at zero."""
    live = x > 0
    return select(live, jnp.sqrt(select(live, x, jnp.ones_like(x))), x)


def power(x: jax.Array, exponent: Any) -> jax.Array:
    """`x**exponent`, with a finite derivative at 0 for exponents below 1 too."""
    live = x > 0
    found = select(live, x, jnp.ones_like(x)) ** exponent
    return select(live, found, jnp.zeros_like(x))


def fraction(x: jax.Array, peak: jax.Array) -> jax.Array:
    """`x / peak` for what is at most the peak, 0 where that is 0."""
    # XLA multiplies by 1 / peak, which is flushed to 0 for the largest peaks.
    shrink = jnp.where(peak > 1, 2.0**-4, jnp.ones_like(peak))
    divisor = jnp.where(peak == 0, jnp.ones_like(peak), peak) * shrink
    return ratio(x * shrink, broadcast_like(divisor, x))


def broadcast_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """`value` in the shape of `like`, and if it is one number split as that is."""
    # An old JAX has no full_like of what varies over devices already.
    is_refused = _axis_names.IS_OLD and _axis_names.varying(jax.typeof(value))
    if value.ndim or is_refused:
        return jnp.broadcast_to(value, like.shape)
    return jnp.full_like(like, value, dtype=value.dtype)


def counted(total: Any, once: Any = True) -> jax.Array:
    """The count, one more where asked; it stays at the largest number."""
    total = jnp.asarray(total)
    room = total < jnp.iinfo(total.dtype).max
    return total + (once & room).astype(total.dtype)
