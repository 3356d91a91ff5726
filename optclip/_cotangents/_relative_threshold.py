"""Compute the statistic of a leaf's norms that relative thresholds are multiples of.

Norms that are 0, such as those of padding, or non-finite are excluded. Custom functions
receive 0 in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._arrays import (
    _axis_names,
    _numerics,
    _placement,
    _validate,
)
from .._arrays._types import Number
from .._norms import Block, declared_of
from .._thresholds import of_ranks

# Function of the norms of a leaf, with 0 for those that are excluded.
Reference = Callable[[jax.Array], Any]


def reference_of(relative: Any) -> Reference | None:
    """Return the function that a `relative` argument specifies."""
    if isinstance(relative, str) and relative == "median":
        return _median
    wanted = "'median', a function of the norms, or None"
    advice = (
        "For another statistic, pass a function, such as"
        " `lambda n: jnp.quantile(n, 0.9)`."
    )
    if relative is not None and not callable(relative):
        raise TypeError(_validate.must_be("relative", wanted, relative, advice))
    return relative


def multiple(
    reference: Reference, block: Block, norms: jax.Array, factor: Number
) -> Number:
    """Return `factor` times the reference, or inf if `factor` is inf."""
    _validate.broadcasts("max_norm", jnp.shape(factor), norms.shape)
    base = _numerics.broadcast_like(_base(reference, norms, block), norms)
    factor = _numerics.broadcast_like(jnp.asarray(factor).astype(norms.dtype), norms)
    largest = jnp.asarray(jnp.finfo(norms.dtype).max, norms.dtype)
    # A finite factor must give a finite threshold, because inf would clip nothing.
    finite = jnp.where(jnp.isinf(factor), jnp.zeros_like(factor), factor)
    return jnp.where(
        jnp.isinf(factor),
        factor,
        jnp.minimum(finite * jnp.minimum(base, largest), largest),
    )


def _axes_of(norm: jax.Array, block: Block) -> _axis_names.Axes:
    """Return the mapped axes that the norms of a leaf are split over.

    Raises:
      ValueError: Neither types nor a `PartitionSpec` specify these axes.
    """
    declared = block.leaves[0].axis_name
    if _axis_names.untyped_axes() and not isinstance(declared, PartitionSpec):
        raise ValueError(
            "With `relative` inside pmap, or inside shard_map with check_vma=False,"
            " `axis_name` must be the PartitionSpec of each leaf because types do not"
            f" specify which devices hold the other norms, got {declared}. Pass the"
            " PartitionSpec, or use shard_map with check_vma=True."
        )
    return _axis_names.split_axes(norm, declared_of(block).axis_name)


def _base(reference: Reference, norms: jax.Array, block: Block) -> jax.Array:
    """Return the reference of all norms of the leaf, including other devices."""
    axes = _axes_of(norms, block)
    every = _placement.whole(norms).ravel()
    every = lax.all_gather(every, axes, tiled=True) if axes else every
    is_counted = (every > 0) & jnp.isfinite(every)
    base = reference(jnp.where(is_counted, every, jnp.zeros_like(every)))
    is_one = _validate.is_number(base) and not jnp.ndim(base)
    _validate.require(
        "The result of `relative`", base, is_one, "a real number", error=TypeError
    )
    return jnp.asarray(base).astype(norms.dtype)


def _median(norms: jax.Array) -> jax.Array:
    """Return the median of the norms above 0, or 0 without any."""
    if not norms.size:
        return jnp.zeros((), norms.dtype)
    zeros = jnp.minimum(jnp.sum(norms == 0), norms.size - 1)
    last = norms.size - 1 - zeros
    low, high = of_ranks(norms, zeros + last // 2, zeros + (last + 1) // 2)
    return low + (high - low) / 2
