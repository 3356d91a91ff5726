"""Compute sums and maxima, over arrays and over the devices that split them.

XLA on CPU drops NaN in any maximum over devices and, in jaxlib 0.10.2 and 0.12.0.1, in
the maximum of 4,096 or more numbers. A sum keeps it, and so does a maximum of flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ._axis_names import Axes, axes_size, split_axes
from ._numerics import select
from ._types import PyTree
from ._xla import Axis, may_be_split


def largest(
    x: jax.Array,
    axis: Axis = None,
    initial: float | None = None,
    of: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Compute the maximum of `of(x)`, or of `x`.

    Args:
      x: The array.
      axis: The axes to reduce, kept as dimensions of 1; None reduces all to a scalar.
      initial: The maximum of no elements; None rejects an empty array.
      of: An elementwise function.
    """
    keepdims = axis is not None
    once, again = (x, x) if of is None else (of(x), of(_read_again(x)))
    peak = jnp.max(once, axis, keepdims=keepdims, initial=initial)
    if may_be_split(x):
        # XLA combines two maxima in one all-reduce; a sum would take another.
        flag = jnp.max(_flagged(again), axis, keepdims=keepdims, initial=0.0)
        return jnp.where(flag > 0, jnp.nan, peak)
    # On CPU a sum reads x in place, while flags would be materialized.
    total = jnp.sum(jnp.abs(again), axis, keepdims=keepdims)
    return select(jnp.isnan(total), total, peak)


def _flagged(x: jax.Array) -> jax.Array:
    """Return 1 where an element is NaN, else 0."""
    return jnp.isnan(x).astype(x.dtype)


def _read_again(x: jax.Array) -> jax.Array:
    # XLA on CPU would materialize a function of x that two reductions read, such as all
    # bfloat16 leaves in float32, so there a barrier hides that both read x. With it, an
    # AdamW step takes 0.5 to 0.7 times the CPU time if gradients are stored, and 1.2 to
    # 1.3 times if they are unscaled, since these are computed twice. Elsewhere XLA
    # computes both in one pass. The zero keeps XLA from merging the barrier with the
    # one before scaling.
    return lax.platform_dependent(
        x, cpu=lambda x: lax.optimization_barrier((x, 0.0))[0], default=lambda x: x
    )


def over_devices(values: PyTree, axes: Axes) -> PyTree:
    """Compute the maxima over mapped axes, all in one collective."""
    flags = jax.tree.map(_flagged, values)
    peaks, flags = lax.pmax((values, flags), axes)
    return jax.tree.map(lambda x, nan: jnp.where(nan > 0, jnp.nan, x), peaks, flags)


def worst_over(value: jax.Array, axes: Axes) -> jax.Array:
    """Compute the maximum over mapped axes, but NaN or -inf if a device has it."""
    # `pmax` has no derivative, so its operand must be a constant.
    highest, lowest = over_devices(lax.stop_gradient((value, -value)), axes)
    return jnp.where(lowest == math.inf, -lowest, highest)


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


def largest_anywhere(value: jax.Array) -> jax.Array:
    """Return the maximum of an array over all devices that hold a part of it."""
    return reduced_over(over_devices, largest(value, initial=-math.inf))
