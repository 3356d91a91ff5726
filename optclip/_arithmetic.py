"""Quotients and roots that keep their derivatives."""

import jax
import jax.numpy as jnp
from jax import lax


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
    return jnp.where(live, jnp.sqrt(jnp.where(live, x, jnp.ones_like(x))), x)
