"""Describe the source of per-example gradients, and their placement on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _axis_names, _leaves, _numerics, _placement, _validate
from .._arrays._axis_names import Axes
from .._arrays._types import PyTree
from . import _microbatches


class Source(NamedTuple):
    """Hold per-example gradients, or the loss and the examples to compute them from.

    `of_one(example)` returns the value, the aux and the gradient of an example. `split`
    holds the mapped axes that split each leaf, and `axes` those that split the
    examples. `loss` returns the value and aux for parameters and an example; it is None
    for gradients that are already computed. With `is_ghost`, norms are computed
    without gradients.
    """

    of_one: Callable[[PyTree], tuple[Any, Any, PyTree]]
    examples: PyTree
    split: PyTree = None
    axes: Axes = ()
    loss: Any = None
    params: PyTree = None
    is_ghost: bool = False


def check_whole(grads: PyTree) -> None:
    """Raise inside `shard_map`, where examples may be split over devices."""
    axes = [_axis_names.varying(jax.typeof(x)) for x in jax.tree.leaves(grads)]
    if any(axes) or _axis_names.untyped_axes():
        raise ValueError(
            "Per-example gradients must be whole on each device, got arrays that are"
            " split over mapped axes. Use jax.jit without shard_map, or pass the loss"
            " to clipped_grad."
        )


def check_together(tree: PyTree) -> None:
    """Raise if leaves are on devices that no single computation accepts."""
    _placement.check_together(
        [(_leaves.named(path), x) for path, x in jax.tree.leaves_with_path(tree)],
        "Leaves of per-example gradients",
        "They are clipped and summed in one computation.",
    )


def check_placed(params: PyTree, examples: PyTree, together: Any) -> None:
    """Raise on Explicit axes where `vmap` cannot place per-example gradients.

    `vmap` does not map over an axis that also shards an unmapped argument, and `select`
    requires its operands to be sharded as the flags are.
    """
    batch = {
        name for x in jax.tree.leaves(examples) for name in _explicit_axes(x, slice(1))
    }
    flat = _leaves.flatten(params)
    for path, x in zip(flat.paths, flat.leaves, strict=True):
        axes = _explicit_axes(x)
        if axes & batch or (axes and together != 1):
            name = f"'{_leaves.path_str(path)}'" if path else "an array"
            raise ValueError(
                f"Parameters must be whole on a mesh of Explicit axes, got {name}"
                f" sharded over {sorted(axes)}. Create the mesh with Auto axes"
                " (jax.sharding.AxisType.Auto), or gather it with jax.reshard."
            )


def _explicit_axes(x: Any, dimensions: slice = slice(None)) -> set[Any]:
    return {*jax.tree.leaves(tuple(jax.typeof(x).sharding.spec[dimensions]))}


def padded(source: Source, padding: Any) -> tuple[Source, jax.Array]:
    """Return the source with padding replaced by other examples, and the padding flags.

    Padding may contain NaN, which would persist in derivatives multiplied by zero.
    """
    number = _microbatches.batch_size(source.examples)
    if padding is None:
        # `vmap` maps flags and examples together, so on Explicit axes they must have
        # the same sharding.
        return source, _placement.no_flags(jax.tree.leaves(source.examples)[0])
    is_bool = getattr(padding, "dtype", None) == np.bool_
    _check_rows("padding", "bools", padding, number, is_bool)
    flags = jnp.asarray(padding)
    if number == 0:
        return source, flags
    examples, _ = harmless(source.examples, ~flags)
    return source._replace(examples=examples), flags


def _check_rows(
    name: str, kind: str, values: Any, number: int, is_kind: bool, advice: str = ""
) -> None:
    """Raise unless there is one value of a kind per example."""
    wanted = f"an array of {number} {kind}, one per example, or None"
    _validate.require(name, values, is_kind, wanted, advice, TypeError)
    advice = f"Its shape is {jnp.shape(values)}."
    _validate.require(name, values, jnp.shape(values) == (number,), wanted, advice)


def harmless(examples: PyTree, counts: jax.Array) -> tuple[PyTree, jax.Array]:
    """Replace each example that does not count by the first that does, if any."""
    is_first = counts & (jnp.arange(counts.shape[0]) == jnp.argmax(counts))

    def replaced(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x

        # A sum selects the example, since indexing needs an output sharding on a mesh
        # of Explicit axes.
        only = jnp.where(by_example(is_first, x), x, jnp.zeros_like(x))
        first = jnp.sum(only, 0, keepdims=True, dtype=x.dtype)
        return jnp.where(by_example(counts, x), x, first)

    return jax.tree.map(replaced, examples), jnp.any(counts)


def by_example(values: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape one value per example to broadcast along the first axis of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def without_padding(tree: Any, is_padding: jax.Array) -> Any:
    """Replace the results of padding by zeros."""
    return jax.tree.map(lambda x: jnp.where(is_padding, jnp.zeros_like(x), x), tree)


class Row(NamedTuple):
    """Hold an example, or a batch of them, with its weight or None."""

    example: PyTree
    weight: Any = None


def with_weights(source: Source, weights: Any) -> Source:
    """Return the source with a `Row` in place of each example.

    Weights are in float32 or wider, sharded like the examples. Their values are data,
    which padding may fill with anything, so only their type is checked. A weight of
    NaN makes the sum NaN.
    """
    number = _microbatches.batch_size(source.examples)
    if weights is None:
        return source._replace(examples=Row(source.examples))
    is_bool = getattr(weights, "dtype", None) == np.bool_
    advice = "For bools, pass padding=~weights." if is_bool else ""
    _check_rows(
        "weights", "real numbers", weights, number, _validate.is_number(weights), advice
    )
    flags = _placement.no_flags(jnp.asarray(jax.tree.leaves(source.examples)[0]))
    weights = _placement.placed_as(_numerics.as_array(weights), flags)
    return source._replace(examples=Row(source.examples, weights))
