"""What there is once for each norm, kept by path: nobody takes it for parameters.

Flax puts a parameter into a box that says how it is sharded, and
`optax.tree_map_params` finds parameters by their structure. In a tree of that structure
one number would get the sharding of a matrix.
"""

import functools
import itertools
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves
from optclip._arrays._types import PyTree

_ONE = jax.tree.structure(0)


class PerNorm(NamedTuple):
    """What a rule remembers of each norm.

    Attributes:
      by_path: a dict from the path of a norm, such as `"encoder/kernel"`.
    """

    by_path: dict[str, Any]


def keyed(treedef: Any, entries: list[Any]) -> Any:
    """One entry for each leaf of a structure as a dict by path; of one array itself."""
    if treedef == _ONE:
        return entries[0]
    return dict(zip(_names(treedef), entries, strict=True))


def packed(memory: PyTree, norm: Any, *, is_like_params: bool) -> Any:
    """A memory with a `PerNorm` in place of each tree of the structure of the norms.

    If norms are as large as the parameters, what is as large as the norms stays: there
    the sharding of the parameters is right.
    """
    treedef = jax.tree.structure(norm)
    if treedef == _ONE or not treedef.num_leaves:
        return memory
    shapes = [jnp.shape(x) for x in jax.tree.leaves(norm)]

    def one(x: Any) -> Any:
        entries = _entries(treedef, x)
        if entries is None:
            return x
        if is_like_params and shapes == [jnp.shape(e) for e in entries]:
            return x
        return PerNorm(keyed(treedef, entries))

    return jax.tree.map(one, memory, is_leaf=lambda x: _entries(treedef, x) is not None)


def unpacked(memory: PyTree, norm: Any) -> Any:
    """The inverse of `packed`; of other norms the dicts, for the caller to refuse."""

    def one(x: Any) -> Any:
        if not isinstance(x, PerNorm):
            return x
        treedef = jax.tree.structure(norm)
        names = _names(treedef)
        if x.by_path.keys() != set(names):
            return x.by_path
        return treedef.unflatten([x.by_path[name] for name in names])

    return jax.tree.map(one, memory, is_leaf=lambda x: isinstance(x, PerNorm))


def in_order(memory: PerNorm, treedef: Any) -> list[Any]:
    """Return the entries of a memory in the order of the norms.

    Raises:
      ValueError: the memory is of norms of another structure.
    """
    names = _names(treedef)
    if memory.by_path.keys() != set(names):
        raise ValueError(
            "The updates must have the norms that the state was made for, with the"
            f" paths {sorted(memory.by_path)[:5]}, got {sorted(names)[:5]}. Pass init"
            " and update trees of one structure."
        )
    return [memory.by_path[name] for name in names]


def unique(name: str, given: Set[str], taken: Set[str]) -> str:
    """`name`, or with the first number behind it that is no other one's name."""
    if name not in taken:
        return name
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return next(n for n in numbered if n not in given and n not in taken)


@functools.lru_cache(maxsize=64)
def _names(treedef: Any) -> tuple[str, ...]:
    """The paths of the leaves, each once: {"a/b": x, "a": {"b": y}} has one twice."""
    numbered = treedef.unflatten(range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree.leaves_with_path(numbered)]
    given = _leaves.names_of(paths)
    known, found = set(given), dict[str, None]()
    for name in given:
        found[unique(name, known, found.keys())] = None
    return tuple(found)


def _entries(treedef: Any, x: Any) -> list[Any] | None:
    """What a tree has at each leaf of a structure; None if it has another one."""
    if jax.tree.structure(x).node_data() != treedef.node_data():
        return None  # First, for the error below would print all arrays.
    try:
        entries = treedef.flatten_up_to(x)
    except (ValueError, TypeError):
        return None
    # A memory of a count and of norms is no tree of norms, though it be as long.
    return entries if len(set(map(jax.tree.structure, entries))) <= 1 else None
