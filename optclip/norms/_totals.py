"""The sum of powers, or the maximum, of each block of arrays, all blocks at once."""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _collectives, _maxima, _xla
from optclip._arrays._batching import Batched
from optclip.norms import _sums
from optclip.norms._sums import Power, Reduce, Scale


class Member(NamedTuple):
    """How one array enters the norm of its block."""

    block: int
    axis: tuple[int, ...] | None
    split: _axis_names.Axes


class Plan(NamedTuple):
    """What is known of all blocks before tracing.

    `guarded` says whether squares may leave the range.
    """

    ord: float
    dtype: str
    members: tuple[Member, ...]
    num_blocks: int
    declared: tuple[_axis_names.Declared, ...]
    guarded: bool


# What elements are multiplied by so that no square of theirs leaves the range.
SHRINK = {"float32": 2.0**-80, "float64": 2.0**-600}


class _Reduction(NamedTuple):
    """How arrays of one block are reduced, and how those that are each a block."""

    together: Callable[..., list[tuple[int, jax.Array]]]
    each: tuple[Reduce, Reduce]
    across: Callable[..., Any]
    local: Callable[[list[jax.Array]], jax.Array]


def _reduction(ord: float) -> _Reduction:
    if ord == math.inf:
        each = _sums.max_over, _sums.max_over
        return _Reduction(_sums.largest, each, _maxima.over_devices, _sums.largest_of)
    each = _sums.sum_over, _xla.compensated_sum
    return _Reduction(_sums.total, each, lax.psum, _sums.exact_sum_of)


def totals_of(arrays: list[jax.Array], plan: Plan, *, shrunk: bool = False) -> Batched:
    """The sum of powers of each block, or the maximum; of elements shrunk, if asked."""
    reduction = _reduction(plan.ord)
    power = Power(plan.ord, plan.dtype)
    scale = None
    if shrunk:
        scale = Scale(*(jnp.asarray(x, plan.dtype) for x in (SHRINK[plan.dtype], 0)))
    stacks = _many_of_one_type(arrays, plan)
    if not stacks:
        everything = range(len(arrays))
        totals = _together(arrays, plan, everything, reduction, power, scale)
        return Batched(totals, plan.declared)
    found = {}
    for stack in stacks:
        members = [plan.members[i] for i in stack]
        # XLA is not to know it: see `Power`.
        own = scale if scale is None else lax.optimization_barrier(scale)
        found[tuple(member.block for member in members)] = _xla.each_reduced(
            *reduction.each,
            [arrays[i] for i in stack],
            members[0].axis,
            functools.partial(power, scale=own),
        )
    done = {i for stack in stacks for i in stack}
    left = [i for i in range(len(arrays)) if i not in done]
    totals = _together(arrays, plan, left, reduction, power, scale)
    known = {block for blocks in found for block in blocks}
    rest = {i: x for i, x in enumerate(totals) if i not in known}
    return Batched.of_stacks(found, rest, plan.declared)


def _together(
    arrays: list[jax.Array],
    plan: Plan,
    indices: Sequence[int],
    reduction: _Reduction,
    power: Power,
    scale: Scale | None,
) -> list[jax.Array]:
    """What some of the arrays bring to each block."""
    members = [plan.members[i] for i in indices]
    terms = [
        _sums.Term(
            arrays[i],
            # Arrays of one block, on the same devices, may be added to one another.
            key=(member.block, member.split) if member.axis is None else None,
            axis=member.axis,
            power=power,
            scale=scale,
        )
        for i, member in zip(indices, members, strict=True)
    ]
    found = reduction.together(terms)
    values, owners = [x for _, x in found], [members[i] for i, _ in found]
    return combined(reduction.across, reduction.local, values, owners, plan)


def _many_of_one_type(arrays: list[jax.Array], plan: Plan) -> list[tuple[int, ...]]:
    """Which small arrays of one type are each a block, many of them."""
    if plan.num_blocks < _xla.MANY:
        return []
    in_block = collections.Counter(member.block for member in plan.members)
    found: dict[Any, list[int]] = {}
    for i, (x, member) in enumerate(zip(arrays, plan.members, strict=True)):
        is_whole = member.axis is None or len(member.axis) == x.ndim
        is_alone = in_block[member.block] == 1 and is_whole and not member.split
        if is_alone and _xla.is_stackable(x):
            key = jax.typeof(x), member.axis, plan.declared[member.block]
            found.setdefault(key, []).append(i)
    return [tuple(same) for same in found.values() if len(same) >= _xla.MANY]


def combined(
    collective: Callable[..., Any],
    local: Callable[[list[jax.Array]], jax.Array],
    found: Sequence[jax.Array],
    members: Sequence[Member],
    plan: Plan,
) -> list[jax.Array]:
    """What was found of the members of each block, combined; 0 of none."""
    blocks: list[list[Any]] = [[] for _ in range(plan.num_blocks)]
    for value, member in zip(found, members, strict=True):
        blocks[member.block].append((value, member.split))
    # A block without leaves has norm zero.
    zero = jnp.zeros((), plan.dtype)
    return _collectives.combine(collective, local, [b or [(zero, ())] for b in blocks])
