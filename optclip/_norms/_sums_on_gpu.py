"""Add powers on a GPU in few kernels: one per large array, and few for all others.

XLA adds a large array in two kernels: many blocks of threads add its parts, and one
block adds their sums. Here the sums of the parts of all arrays are added together, and
the plain and the shrunk powers in the same kernels.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _leaves
from ._powers import SMALL, Member, NormPlan, Power, Shrink, batches_of, merged, shrinks

# A large array is added in rows of one of these lengths, each by one block of threads.
_SHORTEST, _LONGEST = 256, 4096

# Columns are added in parts, at most so many, until there are this many of them: 32 in
# a block of threads, and 192 blocks for the 132 processors of an H100.
_PARTS, _COLUMNS = 32, 6144

# The most vectors that are added together, times two kinds of power, since XLA limits
# the arguments of a kernel.
_TOGETHER = 32

T = TypeVar("T")


class Sum(NamedTuple):
    """Hold a part of the sum of a block.

    Attributes:
      member: The block, and the mapped axes that split it.
      shape: The shape of the sum.
      kinds: For each kind of power the sum, or a vector of numbers to add.
    """

    member: Member
    shape: tuple[int, ...]
    kinds: list[jax.Array]


class Kinds(NamedTuple):
    """Compute the kinds of powers: plain and, if guarded, shrunk."""

    power: Power
    guarded: bool

    def scales(self) -> list[Shrink | None]:
        return [None, *(shrinks(1, self.power.dtype) if self.guarded else [])]

    def functions(self) -> list[Callable[[jax.Array], jax.Array]]:
        scales = self.scales()
        return [functools.partial(self.power, scale=scale) for scale in scales]


def sums(
    arrays: list[jax.Array], plan: NormPlan, *, guarded: bool
) -> tuple[list[list[jax.Array]], list[Member]]:
    """Return parts of the sums of the blocks for each kind of power; their members.

    Args:
      arrays: The arrays, of which XLA splits none over devices.
      plan: The blocks.
      guarded: Whether to add shrunk powers too.
    """
    kinds, batches = (
        Kinds(Power(plan.ord, plan.dtype), guarded),
        batches_of(arrays, plan),
    )
    batches_in = collections.Counter(plan.members[batch[0]] for batch in batches)
    added: list[Sum] = []
    vectors: list[Sum] = []
    alone: dict[Hashable, list[tuple[Member, jax.Array]]] = {}
    for batch in batches:
        member, x = plan.members[batch[0]], arrays[batch[0]]
        shape = _shape_of_sum(x, member.axis)
        if math.prod(shape) != 1:
            added.append(Sum(member, shape, _slices(kinds, member.axis, x)))
        elif _leaves.size_of(x) >= SMALL:
            vectors += [Sum(member, shape, rows) for rows in _in_rows(kinds, x)]
        elif batches_in[member] > 1 or len(batch) > 1:
            group = [arrays[i] for i in batch]
            powers = [merged(False, kinds.power, group, s) for s in kinds.scales()]
            vectors.append(Sum(member, shape, [each.ravel() for each in powers]))
        else:
            alone.setdefault(jax.typeof(x), []).append((member, x))
    for same in alone.values():
        for group in _pieces(same, _TOGETHER):
            columns = _small(kinds, [x for _, x in group])
            for (member, x), *pair in zip(group, *columns, strict=True):
                added.append(Sum(member, _shape_of_sum(x, member.axis), pair))
    added += _large(vectors)
    by_kind = zip(*([_shaped(x, s.shape) for x in s.kinds] for s in added), strict=True)
    return [list(kind) for kind in by_kind], [each.member for each in added]


def _shape_of_sum(x: jax.Array, axis: tuple[int, ...] | None) -> tuple[int, ...]:
    if axis is None:
        return ()
    return tuple(1 if i in axis else size for i, size in enumerate(x.shape))


def _shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else x.reshape(shape)


# Compiled, as are the next functions, so that arrays of one type are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _slices(
    kinds: Kinds, axis: tuple[int, ...] | None, x: jax.Array
) -> list[jax.Array]:
    """Add the powers of each slice, and those of long columns in parts."""
    parted = _in_parts(x, axis, guarded=kinds.guarded)
    if parted is None:
        return [jnp.sum(of(x), axis, keepdims=True) for of in kinds.functions()]
    parts, at = parted
    sums_of_parts = [jnp.sum(of(parts), at + 1) for of in kinds.functions()]
    # Without the barrier XLA would merge the sums in parts and those of the parts.
    sums_of_parts = lax.optimization_barrier(sums_of_parts)
    return [jnp.sum(each, at, keepdims=True) for each in sums_of_parts]


def _in_parts(
    x: jax.Array, axis: tuple[int, ...] | None, *, guarded: bool
) -> tuple[jax.Array, int] | None:
    """Return an array with its columns in parts, along an axis before the added one.

    Whole columns are too little work for all threads, so XLA would store the shrunk
    powers first, an array as large as the leaf. Rows have no such limit.
    """
    lengths = [(i, x.shape[i]) for i in axis or () if x.shape[i] != 1]
    if len(lengths) != 1 or not isinstance(x.size, int) or x.size < SMALL:
        return None
    ((at, length),) = lengths
    columns = x.size // length
    counts = [n for n in range(1, _PARTS + 1) if length % n == 0]
    needed = _COLUMNS if guarded else 0
    enough = (n for n in counts if n * columns >= needed and length <= n * _LONGEST)
    count = next(enough, counts[-1])
    if count == 1 or math.prod(x.shape[at + 1 :]) == 1:
        return None
    shape = *x.shape[:at], count, length // count, *x.shape[at + 1 :]
    return x.reshape(shape), at


@functools.partial(jax.jit, static_argnums=0)
def _in_rows(kinds: Kinds, x: jax.Array) -> list[list[jax.Array]]:
    """Add the powers of a large array in rows; return vectors of each kind."""
    if not isinstance(x.size, int):
        return [[jnp.sum(of(x)).reshape(1) for of in kinds.functions()]]
    lengths = range(_LONGEST, _SHORTEST - 1, -1)
    length = next((n for n in lengths if x.size % n == 0), _LONGEST)
    parts, whole = [x.ravel()], x.size - x.size % length
    if whole != x.size:
        # Elements after the last whole row are rows of their own.
        parts = [parts[0][:whole], parts[0][whole:, None]]
    parts[0] = parts[0].reshape(-1, length)
    # Without the barrier XLA may add one kind while it concatenates, in a kernel that
    # reads the array again.
    return [
        lax.optimization_barrier([jnp.sum(of(y), axis=1) for of in kinds.functions()])
        for y in parts
    ]


@functools.partial(jax.jit, static_argnums=0)
def _small(kinds: Kinds, arrays: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
    """Add the powers of each of some small arrays of one type; return sums by kind."""
    # The barrier keeps XLA from computing the powers of each array in its own kernel.
    stack = lax.optimization_barrier(jnp.stack([x.ravel() for x in arrays]))
    return [jnp.unstack(jnp.sum(of(stack), axis=1)) for of in kinds.functions()]


def _large(vectors: list[Sum]) -> list[Sum]:
    """Add the numbers of vectors, those of many blocks at once."""
    of_sum: dict[tuple[Member, Hashable], list[Sum]] = {}
    for each in vectors:
        varying = _axis_names.varying(jax.typeof(each.kinds[0]))
        of_sum.setdefault((each.member, varying), []).append(each)
    of_length: dict[tuple[int, int, Hashable], list[list[Sum]]] = {}
    for (_, varying), same in of_sum.items():
        for piece in _pieces(same, _TOGETHER):
            length = sum(each.kinds[0].size for each in piece)
            of_length.setdefault((length, len(piece), varying), []).append(piece)
    added = []
    for (_, count, _), pieces in of_length.items():
        for group in _pieces(pieces, max(1, _TOGETHER // count)):
            rows = [[each.kinds for each in piece] for piece in group]
            columns = _rows_of_equal_length(rows)
            for (first, *_), *pair in zip(group, *columns, strict=True):
                added.append(first._replace(kinds=pair))
    return added


@jax.jit
def _rows_of_equal_length(
    rows: list[list[list[jax.Array]]],
) -> list[tuple[jax.Array, ...]]:
    """Add the numbers of each row, a list of vectors by kind; return sums by kind."""
    kinds = range(len(rows[0][0]))
    vectors = [vector[k] for k in kinds for row in rows for vector in row]
    # Without the barrier XLA would add each vector in a kernel of its own.
    table = lax.optimization_barrier(jnp.concatenate(vectors))
    totals = jnp.sum(table.reshape(len(kinds), len(rows), -1), axis=2)
    return [jnp.unstack(total) for total in jnp.unstack(totals)]


def _pieces(items: list[T], most: int) -> list[list[T]]:
    return [items[i : i + most] for i in range(0, len(items), most)]
