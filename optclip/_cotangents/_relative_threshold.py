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

# Function of the norms of a leaf and of the mapped axes that split them.
Reference = Callable[[jax.Array, _axis_names.Axes], jax.Array]


def reference_of(relative: Any) -> Reference | None:
    """Return the function that a `relative` argument specifies."""
    if relative is None:
        return None
    if callable(relative):
        return _of_all(relative)
    if isinstance(relative, str) and relative == "median":
        return _median
    wanted = "'median', a function of the norms, or None"
    advice = (
        "For another statistic, pass a function, such as"
        " `lambda n: jnp.quantile(n, 0.9)`."
    )
    raise TypeError(_validate.must_be("relative", wanted, relative, advice))


def multiple(
    reference: Reference, block: Block, norms: jax.Array, factor: Number
) -> Number:
    """Return `factor` times the reference, or inf if `factor` is inf."""
    _validate.broadcasts("max_norm", jnp.shape(factor), norms.shape)
    base = _numerics.broadcast_like(reference(norms, _axes_of(norms, block)), norms)
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


def _median(norms: jax.Array, axes: _axis_names.Axes) -> jax.Array:
    everywhere = _gathered(norms, axes)
    if not everywhere.size:
        return jnp.zeros((), norms.dtype)
    counted = _counted(everywhere)
    # Excluded norms sort last, as the largest float: differences of inf are NaN.
    largest = jnp.full_like(everywhere, jnp.finfo(norms.dtype).max)
    ordered = jnp.sort(jnp.where(counted, everywhere, largest))
    last = jnp.maximum(jnp.sum(counted) - 1, 0)
    low, high = ordered[last // 2], ordered[(last + 1) // 2]
    median = low + (high - low) / 2
    return jnp.where(jnp.any(counted), median, jnp.zeros_like(median))


def _of_all(function: Callable[[jax.Array], Any]) -> Reference:
    def of_all(norms: jax.Array, axes: _axis_names.Axes) -> jax.Array:
        everywhere = _gathered(norms, axes)
        usable = jnp.where(_counted(everywhere), everywhere, jnp.zeros_like(everywhere))
        reference = function(usable)
        subject = "The result of `relative`"
        is_one = _validate.is_number(reference) and not jnp.ndim(reference)
        _validate.require(subject, reference, is_one, "a real number", error=TypeError)
        return jnp.asarray(reference).astype(norms.dtype)

    return of_all


def _counted(norms: jax.Array) -> jax.Array:
    return (norms > 0) & jnp.isfinite(norms)


def _gathered(norms: jax.Array, axes: _axis_names.Axes) -> jax.Array:
    """Return all norms of the leaf as one vector, including other devices."""
    here = _placement.whole(norms).ravel()
    return lax.all_gather(here, axes, tiled=True) if axes else here
