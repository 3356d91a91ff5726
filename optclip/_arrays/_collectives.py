"""Compute sums and maxima over the devices that a value is split over."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from . import _maxima
from ._axis_names import Axes, axes_size, split_axes
from ._types import PyTree

# Combines each array of a tree over mapped axes, such as `lax.psum`.
Collective = Callable[[PyTree, Axes], PyTree]


def reduced_over(
    collective: Collective, value: jax.Array, axes: Axes | None = None
) -> jax.Array:
    """Return `value` combined over these axes, or those that its type varies over."""
    axes = split_axes(value) if axes is None else axes
    return collective(value, axes) if axes else value


def gathered(vector: jax.Array, axes: Axes) -> jax.Array:
    """Return the whole vector of which each device along these axes has a part.

    The parts are added to zeros, since the type of the result of `lax.all_gather` does
    not specify that all devices have the same.
    """
    if not axes:
        return vector
    is_here = jnp.arange(axes_size(axes)) == lax.axis_index(axes)
    parts = jnp.where(is_here[:, None], vector[None], jnp.zeros_like(vector)[None])
    return lax.psum(parts.reshape(-1), axes)


def largest(value: jax.Array) -> jax.Array:
    """Return the maximum of an array over all devices that hold a part of it."""
    return reduced_over(_maxima.over_devices, _maxima.largest(value, initial=-math.inf))
