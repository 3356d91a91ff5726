"""Compute sums and maxima over the devices that a value is split over."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from optclip._arrays import _maxima
from optclip._arrays._axis_names import Axes, split_axes
from optclip._arrays._types import PyTree

# Combines each array of a tree over mapped axes, such as `lax.psum`.
Collective = Callable[[PyTree, Axes], PyTree]


def combine(
    collective: Collective,
    local: Callable[[list[jax.Array]], jax.Array],
    blocks: list[list[tuple[jax.Array, Axes]]],
) -> list[jax.Array]:
    """Combine the values of each block, across devices too.

    Values that are split over the same axes share one collective, whatever the number
    of blocks.
    """
    by_axes: dict[Axes, dict[int, list[jax.Array]]] = {}
    for i, block in enumerate(blocks):
        for value, axes in block:
            by_axes.setdefault(axes, {}).setdefault(i, []).append(value)
    totals: list[list[jax.Array]] = [[] for _ in blocks]
    for axes, by_block in by_axes.items():
        sums = {i: _of_several(local, values) for i, values in by_block.items()}
        sums = collective(sums, axes) if axes else sums
        for i, value in sums.items():
            totals[i].append(value)
    return [_of_several(local, values) for values in totals]


def _of_several(
    local: Callable[[list[jax.Array]], jax.Array], values: list[jax.Array]
) -> jax.Array:
    return values[0] if len(values) == 1 else local(values)


def reduced_over(
    collective: Collective, value: jax.Array, axes: Axes | None = None
) -> jax.Array:
    """Return `value` combined over these axes, or those that its type varies over."""
    axes = split_axes(value) if axes is None else axes
    return collective(value, axes) if axes else value


def largest(value: jax.Array) -> jax.Array:
    """Return the maximum of an array over all devices that hold a part of it."""
    return reduced_over(_maxima.over_devices, _maxima.largest(value, initial=-math.inf))
