"""Quotients and sums that keep their derivatives and their last bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

# From here on XLA adds by lanes and blocks, to within 2 ULP.
_ADDED_IN_PARTS = 4096


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


def exact_sum(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The sum over `axis` (all if None), kept as dimensions of 1 where given.

    XLA on CPU adds what has fewer than 4,096 elements one by one, which may cost
    hundreds of units in the last place; there each rounding error is carried along, but
    not for an array on a mesh.
    """
    if x.size >= _ADDED_IN_PARTS or _may_be_split(x):
        return jnp.sum(x, axis=axis, keepdims=axis is not None)
    return _carried_sum(x, axis)


def _carried_sum(x: jax.Array, axis: tuple[int, ...] | None) -> jax.Array:
    dims = tuple(range(x.ndim)) if axis is None else axis
    zero = jnp.zeros((), x.dtype)
    total, lost = lax.reduce((x, jnp.zeros_like(x)), (zero, zero), _two_sum, dims)
    total = total + lost
    return total if axis is None else jnp.expand_dims(total, axis)


def exact_sum_of(values: list[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape: folding a thousand plainly costs 4 ULP."""
    if len(values) == 1:
        return values[0]
    return _carried_sum(jnp.stack(values), axis=(0,))[0]


def _may_be_split(x: jax.Array) -> bool:
    """Whether XLA may have split `x` over devices: to carry errors it would gather."""
    types = jax.typeof(x).sharding.mesh.axis_types
    return any(kind != AxisType.Manual for kind in types)


def plain_sum(values: list[jax.Array]) -> jax.Array:
    """The plain sum, for tangents: what is not linear cannot be transposed."""
    return values[0] if len(values) == 1 else jnp.sum(jnp.stack(values), axis=0)


def _two_sum(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sum of two (total, lost): Knuth's error, none where it is not finite."""
    (a, lost_a), (b, lost_b) = one, other
    both = a + b
    rest = both - a
    error = (a - (both - rest)) + (b - rest)
    return both, jnp.where(jnp.isfinite(both), lost_a + lost_b + error, lost_a)
