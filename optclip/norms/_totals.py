"""Compute the sum of powers, or the maximum, of each block of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _collectives, _maxima
from optclip._arrays._batching import Batched
from optclip.norms import _sums
from optclip.norms._sums import Power, Shrink, Term


class Member(NamedTuple):
    """Describe how one array enters the norm of its block."""

    block: int
    axis: tuple[int, ...] | None
    split: _axis_names.Axes


class NormPlan(NamedTuple):
    """Hold the static properties of all blocks.

    `guarded` is whether squares are guarded against overflow.
    """

    ord: float
    dtype: str
    members: tuple[Member, ...]
    num_blocks: int
    declared: tuple[_axis_names.Declared, ...]
    guarded: bool


# Factors that keep the squares of all elements below the largest float.
SHRINK = {"float32": 2.0**-80, "float64": 2.0**-600}


def totals_of(
    arrays: list[jax.Array], plan: NormPlan, *, shrunk: bool = False
) -> Batched:
    """Compute the sum of powers, or the maximum, of each block.

    If `shrunk`, elements are multiplied by `SHRINK` first.
    """
    scale = None
    if shrunk:
        scale = Shrink(*(jnp.asarray(x, plan.dtype) for x in (SHRINK[plan.dtype], 0)))
    power, terms = Power(plan.ord, plan.dtype), []
    for x, member in zip(arrays, plan.members, strict=True):
        # Arrays of one block, on the same devices, may be added to one another.
        key = (member.block, member.split) if member.axis is None else None
        terms.append(Term(x, member.axis, key, power, scale))
    if plan.ord == math.inf:
        totals, across = _sums.largest(terms), _maxima.over_devices
        local = _sums.largest_of
    else:
        totals, across, local = _sums.total(terms), lax.psum, _sums.sum_of
    values, owners = [x for _, x in totals], [plan.members[i] for i, _ in totals]
    return Batched(combined(across, local, values, owners, plan), plan.declared)


def combined(
    collective: _collectives.Collective,
    local: Callable[[list[jax.Array]], jax.Array],
    values: Sequence[jax.Array],
    members: Sequence[Member],
    plan: NormPlan,
) -> list[jax.Array]:
    """Combine the values of each block's members; 0 for a block without members."""
    blocks: list[list[tuple[jax.Array, _axis_names.Axes]]]
    blocks = [[] for _ in range(plan.num_blocks)]
    for value, member in zip(values, members, strict=True):
        blocks[member.block].append((value, member.split))
    # A block without leaves has norm zero.
    zero = jnp.zeros((), plan.dtype)
    return _collectives.combine(collective, local, [b or [(zero, ())] for b in blocks])
