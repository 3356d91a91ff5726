"""Sum over a batch in microbatches, and return outputs of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _numerics, _placement
from .._arrays._types import PyTree

# (examples of a microbatch, padding flags) -> (contributions, outputs). Outputs have an
# axis of examples, and so do contributions unless they are summed.
OfMicrobatch = Callable[[PyTree, jax.Array], tuple[PyTree, PyTree]]

# Number of examples added without compensated summation, which is slower.
PLAIN = 8


def batch_size(examples: PyTree) -> int:
    """Return the length of the first axis, which all arrays of a batch share."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(examples)}
    if len(sizes) != 1 or () in sizes:
        lengths = ", ".join(str(s[0]) if s else "a scalar" for s in sorted(sizes))
        raise ValueError(
            "The arrays of a batch must have first axes of the same length, got"
            f" {lengths or 'no array'}. Pass one row per example; of a loss, list only"
            " arguments with a batch axis in `batch_argnums`."
        )
    return sizes.pop()[0]


def summed(
    function: OfMicrobatch,
    examples: PyTree,
    padding: jax.Array,
    size: int | None,
) -> tuple[PyTree, PyTree]:
    """Return the sum of a function's contributions, and its outputs per example."""
    number = padding.shape[0]
    if size is None or size >= number:
        return _at_once(function, examples, padding)

    def add(part: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        contribution, outputs = function(*chunk)
        return jax.tree.map(jnp.add, part, contribution), outputs

    def step(total: PyTree, chunks: PyTree) -> tuple[PyTree, PyTree]:
        whole, error = total
        part, outputs = lax.scan(add, error, chunks)
        new = jax.tree.map(jnp.add, whole, part)
        # The rounding error is added to the next part, so that the error for a given
        # batch does not grow with the number of microbatches.
        return (new, jax.tree.map(_numerics.rounding_error, whole, part, new)), outputs

    count = -(-number // size)
    few = _few(count, max(PLAIN // size, 1))
    groups = -(-count // few)
    chunks = _chunks(examples, padding, size, groups * few)
    kinds, _ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda kind: _placement.zeros(kind, examples), kinds)
    grouped = jax.tree.map(lambda x: x.reshape(groups, few, *x.shape[1:]), chunks)
    (whole, error), outputs = lax.scan(step, (zeros, zeros), grouped)
    outputs = jax.tree.map(_without_axis, outputs)
    return jax.tree.map(jnp.add, whole, error), _in_order(outputs, number)


def _at_once(
    function: OfMicrobatch, examples: PyTree, padding: jax.Array
) -> tuple[PyTree, PyTree]:
    """Apply a function to the whole batch; return zeros for an empty batch."""
    if padding.shape[0] != 0:
        return function(examples, padding)
    # Do not run the function: XLA on CPU crashes on some programs with empty arrays.
    kinds = jax.eval_shape(function, examples, padding)
    return jax.tree.map(lambda kind: _placement.zeros(kind, examples), kinds)


def of_each(function: Callable[[PyTree, jax.Array], Any]) -> OfMicrobatch:
    """Lift a function of one example and its flag to the examples of a microbatch."""

    def of_all(examples: PyTree, padding: jax.Array) -> Any:
        if padding.shape[0] != 1:
            return jax.vmap(function)(examples, padding)
        # Remove a batch axis of length 1, which makes programs a third slower on CPU.
        one = jax.tree.map(lambda x: jnp.squeeze(x, 0), (examples, padding))
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), function(*one))

    return of_all


def added_up(function: OfMicrobatch) -> OfMicrobatch:
    """Return the same function with its contributions summed."""

    def sum_of(*chunk: Any) -> tuple[PyTree, PyTree]:
        contributions, outputs = function(*chunk)
        return jax.tree.map(lambda x: jnp.sum(x, 0), contributions), outputs

    return sum_of


def each(
    function: OfMicrobatch, examples: PyTree, padding: jax.Array, size: int | None
) -> tuple[PyTree, PyTree]:
    """Return a function's contributions of each example, and its outputs."""
    number = padding.shape[0]
    if size is None or size >= number:
        return _at_once(function, examples, padding)
    chunks = _chunks(examples, padding, size, -(-number // size))
    _, outputs = lax.scan(lambda _, chunk: (None, function(*chunk)), None, chunks)
    return _in_order(outputs, number)


def _few(count: int, most: int) -> int:
    """Return how many microbatches to add without compensation, at most `most`.

    The number divides their count, or pads it by at most an eighth.
    """
    few = -(-count // -(-count // most))
    if -count % few * 8 <= count:
        return few
    return max(k for k in range(1, few + 1) if count % k == 0)


def _chunks(
    examples: PyTree, padding: jax.Array, size: int, count: int
) -> tuple[PyTree, Any]:
    """Split a batch into microbatches of every k-th example, each spread over devices.

    The last microbatches are filled with existing examples, flagged as padding.
    """
    missing = count * size - padding.shape[0]

    def chunked(x: jax.Array, filled: Callable[[jax.Array], jax.Array]) -> jax.Array:
        x = _placement.divisible(jnp.asarray(x), size)
        x = jnp.concatenate([x, filled(x[:missing])]) if missing else x
        return jnp.swapaxes(x.reshape(size, count, *x.shape[1:]), 0, 1)

    flags = chunked(padding, jnp.ones_like)
    return jax.tree.map(lambda x: chunked(x, lambda first: first), examples), flags


def _in_order(outputs: PyTree, number: int) -> PyTree:
    """Return the outputs of the microbatches in the order of the batch."""
    outputs = jax.tree.map(lambda x: _without_axis(jnp.swapaxes(x, 0, 1)), outputs)
    return jax.tree.map(lambda x: x[:number], outputs)


def _without_axis(x: jax.Array) -> jax.Array:
    """Merge the first two axes, also of empty arrays."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
