"""Clip the gradient of each example, then sum."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree
from .._clip import Clip, layout_of
from . import _microbatches, _weighted_sum
from ._bound import Bound
from ._example_gradients import Row, Source, padded, without_padding
from ._info import ExampleInfo

Reduce = Literal["sum", "none"]


def clipped(
    source: Source,
    bound: Bound,
    padding: Any,
    size: int | None,
    reduce: Reduce = "sum",
    *,
    is_ghost: bool = False,
) -> tuple[PyTree, ExampleInfo]:
    """Return the sum of clipped gradients, or each of them, and an `ExampleInfo`.

    The examples of the source are rows, from `with_weights`.
    """
    clip = bound.clip(source.split)
    source, flags = padded(source, padding)
    of_each = _microbatches.of_each(
        functools.partial(_contribution, source, bound, clip)
    )
    if reduce == "none":
        grads, info = _microbatches.each(of_each, source.examples, flags, size)
        return bound.finished(clip, grads), info
    function = _microbatches.added_up(of_each)
    if is_ghost:
        function = _weighted_sum.of_microbatch(source, bound, clip)
    summed, info = _microbatches.summed(function, source.examples, flags, size)
    summed = lax.psum(summed, source.axes) if source.axes else summed
    return bound.finished(clip, summed), info


def measured(
    source: Source, bound: Bound, padding: Any, size: int | None, *, is_ghost: bool
) -> tuple[Any, PyTree]:
    """Return the value and the norms of each example."""
    clip = bound.clip(source.split)
    source, flags = padded(source, padding)

    def of_one(example: PyTree, is_padding: jax.Array) -> tuple[None, PyTree]:
        value, _, grads = source.of_one(example)
        layout = layout_of(clip, _wide(grads))
        norms = layout.tree(clip.norm.measure(layout.blocks).norms.entries())
        return None, without_padding((value, norms), is_padding)

    function = _microbatches.of_each(of_one)
    if is_ghost:
        function = _weighted_sum.measured(source, bound, clip)
    _, values_and_norms = _microbatches.each(function, source.examples, flags, size)
    return values_and_norms


def size_of(microbatch_size: int | None) -> int | None:
    """Return a positive int, or None for all examples; raise for other values."""
    if microbatch_size is None:
        return None
    return _validate.length("microbatch_size", microbatch_size)


def _contribution(
    source: Source,
    bound: Bound,
    clip: Clip,
    row: Row,
    is_padding: jax.Array,
) -> tuple[PyTree, ExampleInfo]:
    """Return the contribution of one example, and its `ExampleInfo`."""
    value, aux, grads = source.of_one(row.example)
    clipped, norms = bound.one_clipped(clip, _wide(grads), row.weight)
    clipped, about = without_padding((clipped, (value, *norms)), is_padding)
    return clipped, ExampleInfo(*about, padding=is_padding, aux=aux)


def _wide(grads: PyTree) -> PyTree:
    """Return the gradient in the precision of its norm, in which it is summed."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(grads) if _leaves.is_floating(x)]
    is_double = any(_leaves.real_dtype(x.dtype) == jnp.float64 for x in leaves)
    real = jnp.float64 if is_double else jnp.float32
    return jax.tree.map(
        lambda x: _leaves.widen(jnp.asarray(x), real) if _leaves.is_floating(x) else x,
        grads,
    )
