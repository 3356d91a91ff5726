"""Each example clipped, then the sum: measure, respond, scale, add."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optclip._arrays import _leaves, _validate
from optclip._arrays._axis_names import Axes
from optclip._arrays._types import PyTree
from optclip._clip._clip import ScalingClip
from optclip.per_example import _microbatches
from optclip.per_example._bound import Bound
from optclip.per_example._info import ExampleInfo

Reduce = Literal["sum", "none"]


class Source(NamedTuple):
    """Where gradients come from, and how they lie on devices.

    `of_one(example)` returns the value of an example, its aux and its gradient; `split`
    has the mapped axes that each leaf is split over; over `axes` examples are.
    """

    of_one: Callable[[PyTree], tuple[Any, Any, PyTree]]
    examples: PyTree
    split: PyTree = None
    axes: Axes = ()


def clipped(
    source: Source, bound: Bound, padding: Any, size: int | None, reduce: Reduce
) -> tuple[PyTree, ExampleInfo]:
    """The sum of the clipped gradients, or each of them, and what each example had."""
    clip = bound.clip(source.split)
    flags = padding_of(padding, source.examples)
    of_microbatch = jax.vmap(functools.partial(_contribution, source, bound, clip))
    if reduce == "none":
        found, info = _microbatches.each(of_microbatch, source.examples, flags, size)
    else:
        found, info = _microbatches.summed(of_microbatch, source.examples, flags, size)
        found = lax.psum(found, source.axes) if source.axes else found
    return bound.finished(clip, found), info


def measured(
    source: Source, bound: Bound, padding: Any, size: int | None
) -> tuple[Any, PyTree]:
    """The value and the norms of each example."""
    clip = bound.clip(source.split)
    flags = padding_of(padding, source.examples)

    def of_one(example: PyTree, is_padding: jax.Array) -> tuple[None, PyTree]:
        value, _, grads = source.of_one(example)
        layout = clip.layout(_wide(grads))
        norms = layout.tree(clip.measure(layout).entries())
        return None, _without_padding((value, norms), is_padding)

    of_microbatch = jax.vmap(of_one)
    _, found = _microbatches.each(of_microbatch, source.examples, flags, size)
    return found


def padding_of(padding: Any, examples: PyTree) -> jax.Array:
    """Which places of the batch are padding, one bool an example."""
    number = _microbatches.batch_size(examples)
    if padding is None:
        return jnp.zeros(number, bool)
    wanted = f"an array of {number} bools, one an example, or None"
    if getattr(padding, "dtype", None) != np.bool_:
        raise TypeError(_validate.must_be("padding", wanted, padding))
    if jnp.shape(padding) != (number,):
        advice = f"Its shape is {jnp.shape(padding)}."
        raise ValueError(_validate.must_be("padding", wanted, padding, advice))
    return jnp.asarray(padding)


def check_size(size: int | None) -> None:
    """Raise unless this is a number of examples, or None for all."""
    if size is not None:
        _validate.length("microbatch_size", size)


def _contribution(
    source: Source,
    bound: Bound,
    clip: ScalingClip,
    example: PyTree,
    is_padding: jax.Array,
) -> tuple[PyTree, ExampleInfo]:
    """What one example adds, and what is known of it."""
    value, aux, grads = source.of_one(example)
    found, norms, coefficients, bad = bound.one_clipped(clip, _wide(grads))
    about = (value, norms, coefficients, bad)
    found, about = _without_padding((found, about), is_padding)
    return found, ExampleInfo(*about, padding=is_padding, aux=aux)


def _wide(grads: PyTree) -> PyTree:
    """The gradient in the precision that it is summed in."""
    return jax.tree.map(
        lambda x: _leaves.widen(jnp.asarray(x)) if _leaves.is_floating(x) else x, grads
    )


def _without_padding(tree: Any, is_padding: jax.Array) -> Any:
    return jax.tree.map(lambda x: jnp.where(is_padding, jnp.zeros_like(x), x), tree)
