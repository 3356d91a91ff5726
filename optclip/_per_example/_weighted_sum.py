"""Compute the clipped sum from norms and scaled cotangents.

Gradients of single examples are computed only where `_ghost` lacks a formula.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._types import PyTree
from .._clip import Clip, layout_of
from ._bound import Bound
from ._example_gradients import Row, Source, without_padding
from ._ghost._choice import unsupported as unsupported_leaf
from ._ghost._ghost_backward import (
    BackwardPass,
    backward,
    weighted_gradients,
)
from ._ghost._squares import scaled_squares
from ._info import ExampleInfo
from ._microbatches import OfMicrobatch


def unsupported(bound: Bound) -> str:
    """Return the error message if `bound` needs gradients, else an empty string."""
    if bound.nonfinite != "raise":
        return ""
    advice = "Pass method='vmap', which computes the gradient of each example."
    wanted = "'zero' or 'propagate' for method='ghost'"
    return _validate.must_be("nonfinite", wanted, bound.nonfinite, advice)


def of_microbatch(source: Source, bound: Bound, clip: Clip) -> OfMicrobatch:
    """Return the clipped sum of a microbatch, and an `ExampleInfo`."""

    def function(rows: Row, padding: jax.Array) -> tuple[PyTree, PyTree]:
        back = _checked_backward(source, rows.example, strict=bound.strict)
        about = jax.vmap(functools.partial(_about, bound, clip))
        norms, by_leaf = about(scaled_squares(back), rows.weight, padding)
        value = jax.vmap(without_padding)(back.values, padding)
        info = ExampleInfo(value, *norms, padding=padding, aux=back.aux)
        return _weighted_sum(clip, back, by_leaf), info

    return function


def _checked_backward(
    source: Source, examples: PyTree, *, strict: bool
) -> BackwardPass:
    back = backward(source.loss, source.params, examples, has_aux=True)
    kinds = jax.tree.unflatten(jax.tree.structure(back.params), back.trace.kinds)
    is_rounded = strict and back.trace.is_narrow()
    if why := unsupported_leaf(kinds, is_rounded=is_rounded):
        raise ValueError(why)
    return back


def measured(source: Source, bound: Bound, clip: Clip) -> OfMicrobatch:
    """Return the value and the norms of the examples of a microbatch."""

    def function(examples: PyTree, padding: jax.Array) -> tuple[None, PyTree]:
        back = _checked_backward(source, examples, strict=False)
        of_one = functools.partial(bound.norms_of_squares, clip)
        # Without leaves, the squares do not contain the number of examples.
        of_all = jax.vmap(of_one, axis_size=len(back.values))
        norms = of_all(scaled_squares(back))
        return None, jax.vmap(without_padding)((back.values, norms), padding)

    return function


def _about(
    bound: Bound, clip: Clip, squares: PyTree, weight: Any, is_padding: jax.Array
) -> Any:
    return without_padding(bound.of_squares(clip, squares, weight), is_padding)


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
