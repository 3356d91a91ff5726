"""Compute sums and maxima over the devices that a value is split over."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from . import _maxima
from ._axis_names import Axes, split_axes
from ._types import PyTree

# Combines each array of a tree over mapped axes, such as `lax.psum`.
Collective = Callable[[PyTree, Axes], PyTree]


def reduced_over(
    collective: Collective, value: jax.Array, axes: Axes | None = None
) -> jax.Array:
    """Return `value` combined over these axes, or those that its type varies over."""
    axes = split_axes(value) if axes is None else axes
    return collective(value, axes) if axes else value


def largest(value: jax.Array) -> jax.Array:
    """Return the maximum of an array over all devices that hold a part of it."""
    return reduced_over(_maxima.over_devices, _maxima.largest(value, initial=-math.inf))
