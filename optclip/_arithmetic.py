"""Quotients and sums that keep their derivatives and their last bits."""

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
    return found, ratio(da - found * db, b)


def over(x: jax.Array, real: jax.Array) -> jax.Array:
    """`x` divided by a real array, part by part if it is complex."""
    if jnp.iscomplexobj(x):
        return lax.complex(ratio(jnp.real(x), real), ratio(jnp.imag(x), real))
    return ratio(x, real)


def exact_sum(values: list[jax.Array]) -> jax.Array:
    """The sum, rounded once: folding a thousand leaves plainly costs 4 ULP."""
    if len(values) == 1:
        return values[0]
    total = jnp.stack(values)
    lost = jnp.zeros_like(total)
    while total.shape[0] > 1:
        if total.shape[0] % 2:
            pad = jnp.zeros_like(total[:1])
            total, lost = (jnp.concatenate([v, pad]) for v in (total, lost))
        half = total.shape[0] // 2
        both, error = _two_sum(total[:half], total[half:])
        total, lost = both, lost[:half] + lost[half:] + error
    return total[0] + lost[0]


def plain_sum(values: list[jax.Array]) -> jax.Array:
    """The plain sum, for tangents: what is not linear cannot be transposed."""
    return values[0] if len(values) == 1 else jnp.sum(jnp.stack(values), axis=0)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`a + b` and its rounding error (Knuth); no error where the sum is not finite."""
    both = a + b
    ok = jnp.isfinite(both)
    zero = jnp.zeros_like(both)
    a, b, total = (jnp.where(ok, x, zero) for x in (a, b, both))
    rest = total - a
    return both, (a - (total - rest)) + (b - rest)
