"""Barriers and lookups without which XLA on CPU copies arrays or compiles for minutes.

Other platforms widen as they read and compute shared values once, so most of these are
left out there by `lax.platform_dependent`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

Axis = tuple[int, ...] | None


def may_be_split(x: jax.Array) -> bool:
    types = jax.typeof(x).sharding.mesh.axis_types
    return any(kind != AxisType.Manual for kind in types)


def materialized(numbers: Any) -> Any:
    """The same numbers, computed once: XLA on CPU does so for the result of a division.

    What else several use it computes anew for each of them. What is below the smallest
    normal number becomes 0, as in most that XLA does on CPU. Integers stay as they are:
    their quotient would be a float, and no integer here costs what a root does.
    """

    def quotient(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return quotient(x.astype(jnp.float32)) != 0
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        # A divisor that XLA cannot know to be 1.
        one = lax.select(x != x, x, jnp.ones_like(x))
        return x / lax.stop_gradient(one)

    return lax.platform_dependent(
        numbers,
        cpu=lambda numbers: jax.tree.map(quotient, numbers),
        default=lambda numbers: numbers,
    )


@jax.custom_jvp
def numbers(vector: jax.Array) -> tuple[jax.Array, ...]:
    """The entries of a vector, each in the shape of the further axes, of size 1."""
    if not isinstance(vector, Tracer):
        # By an index that is an argument: jnp.unstack would compile each.
        return tuple(entry(vector, i) for i in range(len(vector)))
    return lax.platform_dependent(vector, cpu=_looked_up, default=jnp.unstack)


@numbers.defjvp
def numbers_jvp(primals, tangents):
    return numbers(*primals), jnp.unstack(*tangents)


def _looked_up(vector: jax.Array) -> tuple[jax.Array, ...]:
    """The same, by places that XLA does not know.

    Known ones it would write into the kernel of each leaf, so that no two are the same
    and each is compiled: ten times as long to compile, for 500 leaves.
    """
    vector = materialized(vector)
    # A second number, since XLA writes down what holds one only; unsigned, since
    # others could count from the end.
    last = len(vector)
    places = [jnp.array([i, last], jnp.uint32) for i in range(last)]
    places = lax.optimization_barrier(places)
    return tuple(entry(vector, place[0]) for place in places)


def entry(vector: jax.Array, place: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(vector, place, keepdims=False)


def read_again(x: Any) -> Any:
    """Return the same leaf, but hide from XLA that the norm has read it already.

    The barrier keeps XLA on CPU from writing out what the norm and the scaling both
    read: a bfloat16 leaf as float32, in 1.4 times the time of a step, or the squares,
    where an optimizer squares an unclipped leaf. It costs no bytes on a TPU.
    """
    # Outside of jit each operation is a program, and a barrier a copy.
    return lax.optimization_barrier(x) if isinstance(x, Tracer) else x
