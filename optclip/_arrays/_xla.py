"""What XLA on CPU needs: what it does else, and what it costs.

Elsewhere XLA adds in parts, widens as it reads and computes once what several use.
There `lax.platform_dependent` leaves these out.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from optclip._arrays import _axis_names, _leaves, _numerics

# From here on XLA on CPU adds by lanes and blocks, to 2 ULP of all but the worst.
ADDED_IN_PARTS = 4096

# Small arrays of one type are stacked, then each reduced, from so many on: of
# four, in a quarter of the time and less than half to compile; of two, nothing is won.
MANY = 4
# So many at a time: 2,000 in one stack take XLA 4 s, in stacks of 64 they take 1 s.
_STACKED = 64
# A stack is a copy: of 16-bit arrays larger than this it costs what it gains.
_NARROW = 1024

Axis = tuple[int, ...] | None
Reduce = Callable[[jax.Array, Axis], jax.Array]


def is_compensated(x: jax.Array) -> bool:
    """Whether sums are compensated: XLA would gather an array that is sharded."""
    return _leaves.size_of(x) < ADDED_IN_PARTS and not may_be_split(x)


def may_be_split(x: jax.Array) -> bool:
    types = jax.typeof(x).sharding.mesh.axis_types
    return any(kind != AxisType.Manual for kind in types)


def compensated_sum(x: jax.Array, axis: Axis) -> jax.Array:
    """The sum, compensated: rounding errors are summed as well, and added."""
    dims = tuple(range(x.ndim)) if axis is None else axis
    zero = jnp.zeros((), x.dtype)
    sums, lost = lax.reduce((x, jnp.zeros_like(x)), (zero, zero), _two_sum, dims)
    sums = sums + lost
    return sums if axis is None else jnp.expand_dims(sums, axis)


def _two_sum(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The sum of two (sum, lost); what is not finite has lost nothing."""
    (a, lost_a), (b, lost_b) = one, other
    both = a + b
    error = _numerics.lost(a, b, both)
    return both, jnp.where(jnp.isfinite(both), lost_a + lost_b + error, lost_a)


def is_stackable(x: jax.Array) -> bool:
    """Whether arrays like this may be stacked, many of them given."""
    is_small = _leaves.size_of(x) <= _NARROW
    return is_compensated(x) and (x.dtype.itemsize >= 4 or is_small)


def each_reduced(
    reduce: Reduce,
    reduce_on_cpu: Reduce,
    arrays: list[jax.Array],
    axis: Axis,
    power: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """What each of some arrays of one type, over all axes, comes to: one vector."""
    like = arrays[0]

    def apart() -> jax.Array:
        return jnp.stack([reduce(power(x), axis) for x in arrays])

    def stack(start: int) -> jax.Array:
        rows = [x.reshape(1, like.size) for x in arrays[start : start + _STACKED]]
        return reduce_on_cpu(power(lax.concatenate(rows, 0)), (1,))

    def stacked() -> jax.Array:
        starts = range(0, len(arrays), _STACKED)
        found = lax.concatenate([stack(start) for start in starts], 0)
        return found.reshape(len(arrays), *([] if axis is None else [1] * like.ndim))

    return lax.platform_dependent(cpu=stacked, default=apart)


def concatenated(arrays: list[jax.Array]) -> jax.Array:
    """The elements of all, in one array, so that they are reduced by one kernel."""
    if len(arrays) == 1:
        return arrays[0]
    flat = lax.concatenate([x.ravel() for x in arrays], 0)
    # Without the barrier XLA reduces each by itself after all, in a third more time. It
    # joins bfloat16 in float32; as whole numbers (tried once) they took half the room,
    # and a third more time too.
    return lax.optimization_barrier(flat)


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


def barrier(values: list[Any]) -> list[Any]:
    """The same values, but XLA does not know that they are; each keeps its type.

    One `optimization_barrier` would make all vary over the axes that any varies over.
    """
    by_type: dict[Any, list[int]] = {}
    for i, x in enumerate(values):
        by_type.setdefault(_axis_names.varying(jax.typeof(x)), []).append(i)
    out = list(values)
    for indices in by_type.values():
        passed = lax.optimization_barrier([values[i] for i in indices])
        for i, x in zip(indices, passed, strict=True):
            out[i] = x
    return out


def read_again(leaves: dict[int, Any], blocks: dict[int, int]) -> dict[int, Any]:
    """The same leaves, but XLA takes them for other ones than those of the norm.

    Else on CPU what both read is kept in memory: narrow leaves as float32, 6 times
    slower; and the squares, where an optimizer squares what is not clipped, 2 times.
    """
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(leaves)):
        return leaves  # Each operation is a program of its own, and this one a copy.
    block_of = blocks.__getitem__
    narrow = {i: x for i, x in leaves.items() if _leaves.is_narrow(x)}
    wide = {i: x for i, x in leaves.items() if i not in narrow}

    def apart(leaves: dict[int, Any]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        # By block: none waits for leaves that it is not clipped with.
        for _, members in itertools.groupby(sorted(leaves, key=block_of), block_of):
            own = list(members)
            arrays = barrier([leaves[i] for i in own])
            found |= dict(zip(own, arrays, strict=True))
        return found

    # On TPU it costs float32 leaves 3 percent of the bytes of a step.
    wide = lax.platform_dependent(wide, cpu=apart, default=lambda same: same)
    return wide | apart(narrow)


@jax.custom_jvp
def chosen(where, x, otherwise):
    """`jnp.where`, by the bits of bfloat16, which XLA on CPU would widen and round."""
    if x.dtype != jnp.bfloat16 or jax.typeof(x).weak_type:
        return jnp.where(where, x, otherwise)
    bits = (lax.bitcast_convert_type(a, jnp.uint16) for a in (x, otherwise))
    return lax.bitcast_convert_type(jnp.where(where, *bits), x.dtype)


@chosen.defjvp
def chosen_jvp(primals, tangents):
    return chosen(*primals), jnp.where(primals[0], *tangents[1:])
