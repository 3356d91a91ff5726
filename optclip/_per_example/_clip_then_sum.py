"""Clip the gradient of each example, then sum.

With ghost norms, gradients of single examples are computed only where `_ghost` lacks a
formula, and the sum from scaled cotangents.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree
from .._clip import Clip, layout_of
from . import _microbatches
from ._bound import Bound
from ._example_gradients import Row, Source, padded, without_padding
from ._ghost._ghost_backward import (
    BackwardPass,
    backward,
    scaled_squares,
    weighted_gradients,
)
from ._ghost._sites import check_supported
from ._microbatches import OfMicrobatch


class ExampleInfo(NamedTuple):
    """Hold per-example diagnostics, which are sensitive.

    The privacy guarantee does not cover them, since a norm reveals information about
    its example. Arrays have the batch axis first and, except `aux`, are zero at
    padding.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, strict=False)
      >>> batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> _, info = f(jnp.ones(2), batch, padding=jnp.array([False, True]))
      >>> print(info.values, info.norms, info.coefficients)
      [7. 0.] [5. 0.] [0.2 0. ]

    Args:
      values: Loss of each example; None from `clipped_sum`.
      norms: Norm of each example before clipping: `(batch,)`, or a dict or tree of
        these for groups or leaves.
      coefficients: Factor that clips each gradient, like `norms`; excludes the
        divisions of `"unit"` and `normalize_by`.
      nonfinite: Whether each norm is non-finite, like `norms`.
      padding: Bools `(batch,)` that mark padding.
      aux: Auxiliary output of the loss; None without `has_aux`.
    """

    values: jax.Array | None
    norms: PyTree
    coefficients: PyTree
    nonfinite: PyTree
    padding: jax.Array
    aux: Any = None


Reduce = Literal["sum", "none"]


def clipped(
    source: Source,
    bound: Bound,
    padding: Any,
    size: int | None,
    reduce: Reduce = "sum",
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
    if source.is_ghost:
        function = _ghost_microbatch(source, bound, clip)
    summed, info = _microbatches.summed(function, source.examples, flags, size)
    summed = lax.psum(summed, source.axes) if source.axes else summed
    return bound.finished(clip, summed), info


def measured(
    source: Source, bound: Bound, padding: Any, size: int | None
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
    if source.is_ghost:
        function = _ghost_norms(source, bound, clip)
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


def _ghost_microbatch(source: Source, bound: Bound, clip: Clip) -> OfMicrobatch:
    """Return the clipped sum of a microbatch, and an `ExampleInfo`."""

    def function(rows: Row, padding: jax.Array) -> tuple[PyTree, PyTree]:
        back = _checked_backward(source, rows.example, strict=bound.strict)
        # Without leaves, the squares do not contain the number of examples.
        of_all = jax.vmap(
            functools.partial(bound.of_squares, clip), axis_size=len(back.values)
        )
        norms, by_leaf = of_all(scaled_squares(back), rows.weight)
        value, norms, by_leaf = jax.vmap(without_padding)(
            (back.values, norms, by_leaf), padding
        )
        info = ExampleInfo(value, *norms, padding=padding, aux=back.aux)
        return _weighted_sum(clip, back, by_leaf), info

    return function


def _checked_backward(
    source: Source, examples: PyTree, *, strict: bool
) -> BackwardPass:
    back = backward(source.loss, source.params, examples)
    check_supported(back.trace, back.params, strict=strict)
    return back


def _ghost_norms(source: Source, bound: Bound, clip: Clip) -> OfMicrobatch:
    """Return the value and the norms of the examples of a microbatch."""

    def function(examples: PyTree, padding: jax.Array) -> tuple[None, PyTree]:
        back = _checked_backward(source, examples, strict=False)
        of_one = functools.partial(bound.norms_of_squares, clip)
        # Without leaves, the squares do not contain the number of examples.
        norms = jax.vmap(of_one, axis_size=len(back.values))(scaled_squares(back))
        return None, jax.vmap(without_padding)((back.values, norms), padding)

    return function


def _weighted_sum(clip: Clip, back: BackwardPass, by_leaf: PyTree) -> PyTree:
    """Return the sum of the gradients, each multiplied by its coefficient."""
    leaves, treedef = jax.tree.flatten(back.params)
    weights = treedef.flatten_up_to(by_leaf)
    layout = layout_of(clip, back.params)
    out: list[Any] = [None] * len(leaves)
    for block in sorted({block for *_, block in layout.scaled}):
        which = [i for i, _, leaf_block in layout.scaled if leaf_block == block]
        weight = weights[which[0]]
        # The alarm is NaN if a coefficient is, so that gradients become NaN even where
        # they do not depend on that example.
        alarm = jnp.sum(weight - weight)
        sums = weighted_gradients(back, which, weight)
        for i, total in zip(which, sums, strict=True):
            out[i] = total + alarm.astype(total.dtype)
    return treedef.unflatten(out)
