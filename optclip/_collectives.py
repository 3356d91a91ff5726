"""Sums and maxima that span the devices a value is split over, and barriers."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from optclip import _leaves
from optclip._mapped import Axes, split_axes


def combine(
    collective: Callable[..., Any],
    local: Callable[[list[jax.Array]], jax.Array],
    parts: list[list[tuple[jax.Array, Axes]]],
) -> list[jax.Array]:
    """Combine the parts of each block, across devices too.

    Parts that are split over the same axes travel in one collective, whatever the
    number of blocks.
    """
    rows: dict[Axes, dict[int, list[jax.Array]]] = {}
    for i, block in enumerate(parts):
        for value, axes in block:
            rows.setdefault(axes, {}).setdefault(i, []).append(value)
    totals: list[list[jax.Array]] = [[] for _ in parts]
    for axes, by_block in rows.items():
        sums = {i: local(values) for i, values in by_block.items()}
        sums = collective(sums, axes) if axes else sums
        for i, value in sums.items():
            totals[i].append(value)
    return [local(values) for values in totals]


def spanning(
    collective: Callable[..., Any], value: jax.Array, axes: Axes | None = None
) -> jax.Array:
    """`value` combined over these axes, or those that its type varies over."""
    axes = split_axes(value) if axes is None else axes
    return collective(value, axes) if axes else value


def largest(value: jax.Array) -> jax.Array:
    """The maximum of an array, on all devices that hold a part of it."""
    return spanning(lax.pmax, jnp.max(value, initial=-jnp.inf))


def barrier(values: list[Any]) -> list[Any]:
    """The same values, but XLA does not know that they are; each keeps its type.

    One `optimization_barrier` would make all vary over the axes that any varies over.
    """
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(values):
        alike.setdefault(jax.typeof(x).manual_axis_type, []).append(i)
    out = list(values)
    for indices in alike.values():
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
