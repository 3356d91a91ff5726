"""Define the powers of elements that norms add, and merge those of small arrays."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _leaves, _placement, _xla
from .._arrays._batching import MANY

# Smaller arrays are merged, up to this many of one type, since XLA compiles a reduction
# in 9 ms, and 2,000 of them in 18 s.
SMALL, MERGED = 4096, 32

# XLA on CPU would store the sum of more large arrays than this.
MERGED_LARGE = 12

# Factors that keep the squares of all elements below the largest float.
SHRINK = {"float32": 2.0**-80, "float64": 2.0**-600}


class Member(NamedTuple):
    """Describe how one array enters the norm of its block.

    Unless `layers` is None, the block has a vector of norms, one for each index of that
    axis of its arrays.
    """

    block: int
    axis: tuple[int, ...] | None
    split: _axis_names.Axes
    layers: int | None = None

    def of_block(self, value: jax.Array) -> jax.Array:
        """Return the sums of an array in the shape of the norms."""
        if self.layers is None:
            return value
        # Arrays of one stack may be sharded differently, and have few layers.
        return _placement.whole(lax.squeeze(value, self.axis or ()))

    def of_array(self, norm: jax.Array, x: jax.Array) -> jax.Array:
        """Return the norms in a shape that broadcasts to an array."""
        return norm if self.layers is None else _placement.along(norm, x, self.layers)


class NormPlan(NamedTuple):
    """Hold the static properties of all blocks.

    `declared` has one entry per block; `guarded` is whether squares are guarded against
    overflow.
    """

    ord: float
    dtype: str
    members: tuple[Member, ...]
    declared: tuple[_axis_names.Declared, ...]
    guarded: bool


class Shrink(NamedTuple):
    """Hold the factor of shrunk elements, and a zero to add.

    A barrier before each use hides both values from XLA, which would otherwise merge
    the factors of a square.
    """

    factor: jax.Array
    zero: jax.Array


class Stack(NamedTuple):
    """Hold small arrays, each the only one of its block, as the rows of one array."""

    indices: list[int]
    rows: jax.Array


class Power(NamedTuple):
    """Compute the power of each element; equal instances are traced once."""

    ord: float
    dtype: str

    def __call__(self, x: jax.Array, scale: Shrink | None = None) -> jax.Array:
        # Powers are computed in the dtype of the sum, where squares of float16 fit.
        x = _leaves.widen(x, self.dtype)
        if self.ord != 2:
            return lax.abs(x)
        parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
        if scale is not None:
            # The added zero keeps the product whole: XLA may turn the square of x * c
            # alone into x * x * (c * c), which is inf * 0.
            parts = [part * scale.factor + scale.zero for part in parts]
        squares = [lax.square(part) for part in parts]
        return squares[0] if len(squares) == 1 else squares[0] + squares[1]


def shrinks(count: int, dtype: str) -> list[Shrink]:
    """Return the factor of shrunk elements, once per batch."""
    scale = Shrink(*(jnp.asarray(x, dtype) for x in (SHRINK[dtype], 0)))
    # The barrier returns one scale per batch. XLA would write out a shared scale as an
    # array as large as the largest leaf.
    return lax.optimization_barrier([scale] * count)


def batches_of(
    arrays: list[jax.Array], plan: NormPlan, small: float = SMALL
) -> list[list[int]]:
    """Group arrays smaller than `small` of one block, type and devices."""
    groups: dict[Hashable, list[int]] = {}
    for i, (x, member) in enumerate(zip(arrays, plan.members, strict=True)):
        is_alone = member.axis is not None or _leaves.size_of(x) >= small
        groups.setdefault(i if is_alone else (member, jax.typeof(x)), []).append(i)
    batches = []
    for group in groups.values():
        is_small = _leaves.size_of(arrays[group[0]]) < SMALL
        most = MERGED if is_small else MERGED_LARGE
        batches += [group[i : i + most] for i in range(0, len(group), most)]
    return batches


def stacks_of(arrays: list[jax.Array], plan: NormPlan) -> list[Stack]:
    """Stack small arrays of one type, each of which is a block with one norm.

    XLA compiles three kernels for the sum of each array, and two kernels for a stack.
    """
    in_block = collections.Counter(member.block for member in plan.members)
    groups: dict[Hashable, list[int]] = {}
    for i, (x, member) in enumerate(zip(arrays, plan.members, strict=True)):
        axis = range(x.ndim) if member.axis is None else member.axis
        is_whole = math.prod(x.shape[a] for a in axis) == x.size
        is_small = 0 < _leaves.size_of(x) <= SMALL and not _xla.may_be_split(x)
        is_alone = in_block[member.block] == 1 and member.layers is None
        if is_whole and is_small and is_alone:
            kind = jax.typeof(x), member.axis, member.split
            groups.setdefault(kind, []).append(i)
    return [
        Stack(
            group[start : start + MERGED],
            _stacked(arrays, group[start : start + MERGED]),
        )
        for group in groups.values()
        if len(group) >= MANY
        for start in range(0, len(group), MERGED)
    ]


def _stacked(arrays: list[jax.Array], indices: list[int]) -> jax.Array:
    # The barrier keeps XLA from computing the powers of each array in its own kernel.
    return lax.optimization_barrier(jnp.stack([arrays[i].ravel() for i in indices]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def merged(
    is_max: bool, power: Power, arrays: list[jax.Array], scale: Shrink | None
) -> jax.Array:
    """Merge powers; compiled, so that equal batches are traced once.

    Tracing each batch would take twice as long for 1,000 leaves.
    """
    powers = [power(x, scale) for x in arrays]
    return by_pairs(lax.max if is_max else lax.add, powers)[0]


def by_pairs(
    merge: Callable[[jax.Array, jax.Array], jax.Array],
    values: list[jax.Array],
    most: int = 1,
) -> list[jax.Array]:
    """Merge values in pairs until at most `most` remain."""
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values
