"""The sum of powers, or the maximum, of each block of arrays, all blocks at once."""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _collectives, _leaves, _xla
from optclip._arrays._batching import Batched
from optclip.norms import _sums
from optclip.norms._sums import Reduce, Scale


class Member(NamedTuple):
    """How one array enters its block's norm."""

    block: int
    axis: tuple[int, ...] | None
    split: _axis_names.Axes


class Plan(NamedTuple):
    """What is known of all blocks before tracing.

    `guarded` says whether squares may leave the range.
    """

    ord: float
    dtype: str
    parts: tuple[Member, ...]
    num_blocks: int
    declared: tuple[_axis_names.Declared, ...]
    guarded: bool


# What elements are multiplied by so that no square of theirs leaves the range.
SHRINK = {"float32": 2.0**-80, "float64": 2.0**-600}


class _Power(NamedTuple):
    """The power of each element; equal to others of one kind, so traced once."""

    ord: float
    dtype: str

    def __call__(self, x: jax.Array, scale: Scale | None) -> jax.Array:
        x = _leaves.widen(x, self.dtype)
        if self.ord != 2:
            return lax.abs(x)
        parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
        if scale is not None:
            # The square of x * c alone XLA may turn into x * x * (c * c), inf * 0.
            parts = [part * scale.factor + scale.zero for part in parts]
        squares = [lax.square(part) for part in parts]
        return squares[0] if len(squares) == 1 else squares[0] + squares[1]


class _Reduction(NamedTuple):
    """How arrays of one block are reduced, and how those that are each a block."""

    together: Callable[..., list[tuple[int, jax.Array]]]
    each: tuple[Reduce, Reduce]
    across: Callable[..., Any]
    local: Callable[[list[jax.Array]], jax.Array]


def _reduction(ord: float) -> _Reduction:
    if ord == math.inf:
        each = _sums.max_over, _sums.max_over
        return _Reduction(_sums.largest, each, lax.pmax, _sums.largest_of)
    each = _sums.sum_over, _xla.compensated_sum
    return _Reduction(_sums.total, each, lax.psum, _sums.exact_sum_of)


def totals_of(arrays: list[jax.Array], plan: Plan, *, shrunk: bool = False) -> Batched:
    """The sum of powers of each block, or the maximum; of elements shrunk, if asked."""
    reduction = _reduction(plan.ord)
    power = _Power(plan.ord, plan.dtype)
    scale = None
    if shrunk:
        scale = Scale(*(jnp.asarray(x, plan.dtype) for x in (SHRINK[plan.dtype], 0)))
    at_once = _many_of_one_type(arrays, plan)
    runs = {}
    for members in at_once:
        parts = [plan.parts[m] for m in members]
        # XLA is not to know it: see `_Power`.
        own = scale if scale is None else lax.optimization_barrier(scale)
        runs[tuple(part.block for part in parts)] = _xla.each_reduced(
            *reduction.each,
            [arrays[m] for m in members],
            parts[0].axis,
            functools.partial(power, scale=own),
        )
    done = {m for members in at_once for m in members}
    left = [i for i in range(len(arrays)) if i not in done]
    totals = _together(arrays, plan, left, reduction, power, scale)
    known = {block for blocks in runs for block in blocks}
    rest = {i: x for i, x in enumerate(totals) if i not in known}
    return Batched.joined(runs, rest, plan.declared)


def _together(
    arrays: list[jax.Array],
    plan: Plan,
    indices: list[int],
    reduction: _Reduction,
    power: _Power,
    scale: Scale | None,
) -> list[jax.Array]:
    """What some of the arrays bring to each block."""
    parts = [plan.parts[i] for i in indices]
    terms = [
        _sums.Term(
            arrays[i],
            # Arrays of one block, on the same devices, may be added to one another.
            key=(part.block, part.split) if part.axis is None else None,
            axis=part.axis,
            power=power,
            scale=scale,
        )
        for i, part in zip(indices, parts, strict=True)
    ]
    found = reduction.together(terms)
    values, owners = [x for _, x in found], [parts[i] for i, _ in found]
    return combined(reduction.across, reduction.local, values, owners, plan)


def _many_of_one_type(arrays: list[jax.Array], plan: Plan) -> list[tuple[int, ...]]:
    """Which small arrays of one type are each a block, many of them."""
    parts_of = collections.Counter(part.block for part in plan.parts)
    found: dict[Any, list[int]] = {}
    for i, (x, part) in enumerate(zip(arrays, plan.parts, strict=True)):
        is_whole = part.axis is None or len(part.axis) == x.ndim
        is_alone = parts_of[part.block] == 1 and is_whole and not part.split
        if is_alone and _xla.is_row(x):
            key = jax.typeof(x), part.axis, plan.declared[part.block]
            found.setdefault(key, []).append(i)
    return [tuple(members) for members in found.values() if len(members) >= _xla.MANY]


def combined(
    collective: Callable[..., Any],
    local: Callable[[list[jax.Array]], jax.Array],
    found: list[jax.Array],
    parts: list[Member],
    plan: Plan,
) -> list[jax.Array]:
    """What was found of the parts of each block, combined; 0 of none."""
    blocks: list[list[Any]] = [[] for _ in range(plan.num_blocks)]
    for value, part in zip(found, parts, strict=True):
        blocks[part.block].append((value, part.split))
    # A block without leaves has norm zero.
    zero = jnp.zeros((), plan.dtype)
    return _collectives.combine(collective, local, [b or [(zero, ())] for b in blocks])
