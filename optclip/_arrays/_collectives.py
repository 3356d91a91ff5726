"""Sums and maxima that span the devices a value is split over, and barriers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays._axis_names import Axes, split_axes


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
