"""Keep one value per block, and compute with many scalars as one vector.

Each norm is followed by dozens of operations on scalars. Written separately for 2,000
leaves they take XLA minutes to compile; as operations on one vector, almost no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import _placement, _xla
from ._types import PyTree

# Fewer numbers than this are processed one by one, since stacking and unstacking them
# takes more operations.
MANY = 4


@jax.tree_util.register_pytree_node_class
class Batched:
    """Hold a list of pytrees of arrays, with those that hold one number stacked.

    Entries are stacked if they have one type and one entry of `declared`, and are at
    least `MANY`.

    Attributes:
      indices: For each stack, the indices of its entries in the list.
      values: For each stack its entry or, of several, one pytree of vectors.
    """

    indices: tuple[tuple[int, ...], ...]
    values: list[Any]

    def __init__(self, entries: list[Any], declared: Sequence[Any] = ()) -> None:
        by_type: dict[Any, list[int]] = {}
        for i, entry in enumerate(entries):
            kind = _kind(entry)
            key = i if kind is None else (kind, declared[i] if declared else None)
            by_type.setdefault(key, []).append(i)
        self.indices = tuple(
            stack
            for index in by_type.values()
            for stack in (
                [tuple(index)] if len(index) >= MANY else [(i,) for i in index]
            )
        )
        self.values = self._stacked(entries)

    @classmethod
    def unstacked(cls, entries: Sequence[Any]) -> Batched:
        """Return entries of which none are stacked."""
        return cls.tree_unflatten(tuple((i,) for i in range(len(entries))), entries)

    @classmethod
    def of_vector(cls, vector: jax.Array) -> Batched:
        """Return the numbers of a vector of two or more, as one stack."""
        return cls.tree_unflatten((tuple(range(len(vector))),), [vector])

    def with_entries(self, entries: list[Any]) -> Batched:
        """Return other entries, stacked as these are."""
        return self.tree_unflatten(self.indices, self._stacked(entries))

    def map(self, function: Callable[..., Any], *others: Batched) -> Batched:
        """Return the result of `function` for each entry, with those of `others`."""
        if any(other.indices != self.indices for other in others):
            raise ValueError("The other values must have the same stacks of entries.")
        columns = [self.values, *(other.values for other in others)]
        values = [
            function(*entry) if len(index) == 1 else jax.vmap(function)(*entry)
            for index, *entry in zip(self.indices, *columns, strict=True)
        ]
        return self.tree_unflatten(self.indices, values)

    def entries(self, *, as_slices: bool = False) -> list[Any]:
        """Return the list.

        Args:
          as_slices: Whether to return numbers as plain slices of their stack. XLA
            removes these if the numbers are stacked again.
        """
        by_index: dict[int, Any] = {}
        for index, value in zip(self.indices, self.values, strict=True):
            entries = _unstacked(value, len(index), as_slices)
            by_index.update(zip(index, entries, strict=True))
        return [by_index[i] for i in range(len(by_index))]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each entry, for entries that are arrays."""
        shapes: dict[int, tuple[int, ...]] = {}
        for index, value in zip(self.indices, self.values, strict=True):
            shape = jnp.shape(value)
            shapes.update(dict.fromkeys(index, shape[1:] if len(index) > 1 else shape))
        return [shapes[i] for i in range(len(shapes))]

    def vector(self) -> jax.Array:
        """Return the entries, each one number, as one vector in their order."""
        if len(self.indices) == 1 and len(self.indices[0]) > 1:
            return self.values[0]
        return jnp.stack(self.entries(as_slices=True))

    def any(self) -> jax.Array:
        """Return whether any of these flags is set."""
        by_shape: dict[Any, list[jax.Array]] = {}
        for i, flag in enumerate(self.values):
            # XLA compiles three kernels for each array that it reduces.
            key = i if _xla.may_be_split(flag) else flag.shape
            by_shape.setdefault(key, []).append(flag)
        joined = [functools.reduce(jnp.logical_or, x) for x in by_shape.values()]
        flags = [jnp.any(flag) if flag.ndim else flag for flag in joined]
        return flags[0] if len(flags) == 1 else jnp.any(jnp.stack(flags))

    def together(self) -> Batched:
        """Return the entries where one computation accepts all; see `_placement`."""
        moved = _placement.together(self.values)
        if moved is self.values:
            return self
        return Batched(self.tree_unflatten(self.indices, moved).entries())

    def tree_flatten(self) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
        """Return the children and static data, for JAX."""
        return self.values, self.indices

    @classmethod
    def tree_unflatten(cls, indices: Any, values: Any) -> Batched:
        """Build from static data and children, for JAX."""
        batched = object.__new__(cls)
        batched.indices, batched.values = indices, list(values)
        return batched

    def _stacked(self, entries: list[Any]) -> list[Any]:
        return [_stacked([entries[i] for i in index]) for index in self.indices]


def each(
    function: Callable[..., Any], tree: PyTree, *rest: Any, as_slices: bool = True
) -> Any:
    """Map a function over trees, with equal types batched by `jax.vmap`.

    Most results are stacked again, as by another `each`, which makes slices free.
    Results that the kernels of leaves use must not be `as_slices`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    columns = [leaves, *map(treedef.flatten_up_to, rest)]
    results = Batched(list(zip(*columns, strict=True))).map(
        lambda entry: function(*entry)
    )
    return treedef.unflatten(results.entries(as_slices=as_slices))


def _kind(entry: Any) -> Any:
    """Return the type that stacked entries share; None if it cannot be stacked."""
    leaves, treedef = jax.tree.flatten(entry)
    # Slices are excluded, since the slices of a split leaf may be split too. So are
    # numbers split over an axis of one device, since the lookup forgets that axis.
    if any(jnp.size(x) != 1 or any(jax.typeof(x).sharding.spec) for x in leaves):
        return None
    return treedef, *map(jax.typeof, leaves), *map(_placement.devices_of, leaves)


def _stacked(entries: list[Any]) -> Any:
    if len(entries) == 1:
        return entries[0]

    def stacked(*scalars: Any) -> Any:
        first = scalars[0]
        if all(isinstance(x, np.generic) for x in scalars):
            return np.stack(scalars)
        if all(x is first for x in scalars):
            return jnp.broadcast_to(first, (len(scalars), *jnp.shape(first)))
        return jnp.stack(scalars)

    return jax.tree.map(stacked, *entries)


def _unstacked(value: Any, size: int, as_slices: bool) -> list[Any]:
    if size == 1:
        return [value]
    vectors, treedef = jax.tree.flatten(value)
    columns = zip(*(_columns(vector, as_slices) for vector in vectors), strict=True)
    return [treedef.unflatten(column) for column in columns]


def _columns(vector: jax.Array, as_slices: bool) -> Sequence[jax.Array]:
    if as_slices and isinstance(vector, Tracer):
        return jnp.unstack(vector)
    return _xla.numbers(vector)
