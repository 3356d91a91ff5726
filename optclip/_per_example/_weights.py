"""Attach a weight and a threshold to each example of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _numerics, _placement, _validate
from .._arrays._types import PyTree
from . import _microbatches
from ._example_gradients import Source


class Row(NamedTuple):
    """Hold an example, or a batch of them, with weights and thresholds or None."""

    example: PyTree
    weight: Any = None
    thresholds: PyTree = None


def with_rows(source: Source, weights: Any, thresholds: PyTree) -> Source:
    """Return the source with a `Row` in place of each example."""
    number = _microbatches.batch_size(source.examples)
    flags = _placement.no_flags(jnp.asarray(jax.tree.leaves(source.examples)[0]))
    if weights is not None:
        wanted = f"an array of {number} real numbers, one per example, or None"
        advice = "For bools, pass padding=~weights." if _is_bool(weights) else ""
        weights = _checked("weights", weights, flags, wanted, advice)
    wanted = f"an array of {number} real numbers, one per example, or a tree of these"
    thresholds = jax.tree.map(
        lambda values: _checked("thresholds", values, flags, wanted), thresholds
    )
    return source._replace(examples=Row(source.examples, weights, thresholds))


def _checked(
    name: str, values: Any, flags: jax.Array, wanted: str, advice: str = ""
) -> jax.Array:
    """Return values in float32 or wider, sharded like the examples.

    Their contents are data, which padding may fill with anything, so only their type is
    checked. NaN makes the sum NaN, and a negative threshold clips to zero.
    """
    if not _validate.is_number(values):
        raise TypeError(_validate.must_be(name, wanted, values, advice))
    if jnp.shape(values) != flags.shape:
        advice = f"Its shape is {jnp.shape(values)}."
        raise ValueError(_validate.must_be(name, wanted, values, advice))
    x = _numerics.as_array(values)
    return _placement.placed_as(x, flags)


def _is_bool(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.bool_
