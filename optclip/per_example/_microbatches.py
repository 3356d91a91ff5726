"""A sum over a batch, a few examples at a time, with what each of them had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _numerics, _placement
from optclip._arrays._types import PyTree

# (examples of a microbatch, which of them are padding) -> (contributions, outputs). The
# outputs have an axis of examples, and the contributions unless they are added up.
OfMicrobatch = Callable[[PyTree, jax.Array], tuple[PyTree, PyTree]]


def batch_size(examples: PyTree) -> int:
    """The length of the first axis, which all arrays of a batch have in common."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(examples)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "The arrays of a batch must have the same first axis, one entry an example,"
            f" got first axes of {sorted(sizes) or 'no array'}. Give each a batch axis."
        )
    return sizes.pop()[0]


def summed(
    function: OfMicrobatch,
    examples: PyTree,
    padding: jax.Array,
    size: int | None,
) -> tuple[PyTree, PyTree]:
    """The sum of what a function adds up, and the outputs of each example."""
    number = len(padding)
    if size is None or size >= number:
        return _at_once(function, examples, padding)

    def step(total: _Compensated, chunk: PyTree) -> tuple[_Compensated, PyTree]:
        found, outputs = function(*chunk)
        return total.plus(found), outputs

    chunks = _chunks(examples, padding, size)
    kinds, _ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda kind: _placement.zeros(kind, examples), kinds)
    total, outputs = lax.scan(step, _Compensated(zeros, zeros), chunks)
    return total.value(), _in_order(outputs, number)


def _at_once(
    function: OfMicrobatch, examples: PyTree, padding: jax.Array
) -> tuple[PyTree, PyTree]:
    """What a function gives for the whole batch; zeros where there is no example."""
    if len(padding):
        return function(examples, padding)
    # It is not run: XLA on CPU crashes on some programs of empty arrays.
    kinds = jax.eval_shape(function, examples, padding)
    return jax.tree.map(lambda kind: _placement.zeros(kind, examples), kinds)


def added_up(function: OfMicrobatch) -> OfMicrobatch:
    """The same function, its contributions added up."""

    def sum_of(*chunk: Any) -> tuple[PyTree, PyTree]:
        found, outputs = function(*chunk)
        return jax.tree.map(lambda x: jnp.sum(x, 0), found), outputs

    return sum_of


def each(
    function: OfMicrobatch, examples: PyTree, padding: jax.Array, size: int | None
) -> tuple[PyTree, PyTree]:
    """The contributions themselves, and the outputs."""
    number = len(padding)
    if size is None or size >= number:
        return _at_once(function, examples, padding)
    chunks = _chunks(examples, padding, size)
    _, found = lax.scan(lambda _, chunk: (None, function(*chunk)), None, chunks)
    return _in_order(found, number)


@jax.tree_util.register_pytree_node_class
class _Compensated:
    """A sum with what its roundings have lost.

    So the error of a sum of many microbatches does not grow with their number.
    """

    def __init__(self, total: PyTree, lost: PyTree) -> None:
        self.total, self.lost = total, lost

    def plus(self, other: PyTree) -> _Compensated:
        total = jax.tree.map(jnp.add, self.total, other)
        lost = jax.tree.map(_numerics.lost, self.total, other, total)
        return _Compensated(total, jax.tree.map(jnp.add, self.lost, lost))

    def value(self) -> PyTree:
        return jax.tree.map(jnp.add, self.total, self.lost)

    def tree_flatten(self) -> tuple[tuple[PyTree, PyTree], None]:
        """For jax."""
        return (self.total, self.lost), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> _Compensated:
        """For jax."""
        return cls(*children)


def _chunks(examples: PyTree, padding: jax.Array, size: int) -> tuple[PyTree, Any]:
    """Microbatches: every k-th example, so that each device has some of each.

    The last are filled up with examples that are there, as padding.
    """
    number = len(padding)
    count = -(-number // size)
    missing = count * size - number

    def chunked(x: jax.Array, filled: Callable[[jax.Array], jax.Array]) -> jax.Array:
        x = _placement.divisible(jnp.asarray(x), size)
        x = jnp.concatenate([x, filled(x[:missing])]) if missing else x
        return jnp.swapaxes(x.reshape(size, count, *x.shape[1:]), 0, 1)

    flags = chunked(padding, jnp.ones_like)
    return jax.tree.map(lambda x: chunked(x, lambda first: first), examples), flags


def _in_order(outputs: PyTree, number: int) -> PyTree:
    """What came out of the microbatches, in the order of the batch."""

    def ordered(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, 0, 1)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:number]

    return jax.tree.map(ordered, outputs)
