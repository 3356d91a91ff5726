"""Take the arrays of a state out of the variables of Flax NNX, and put them back.

`nnx.Optimizer` stores each array of a state in a variable, a node with one child.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from .._arrays import _leaves
from .._arrays._types import PyTree


def unboxed(tree: PyTree) -> PyTree:
    """Return a tree with the content of each box, and with dicts for other mappings.

    The leaves keep their order.
    """

    def one(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: unboxed(value) for key, value in x.items()}
        return jax.tree.leaves(x, is_leaf=lambda y: y is not x)[0] if _is_box(x) else x

    return jax.tree.map(
        one,
        tree,
        is_leaf=lambda x: (
            (isinstance(x, Mapping) and not isinstance(x, dict)) or _is_box(x)
        ),
    )


def boxed_as(state: PyTree, expected: PyTree, fresh: PyTree) -> PyTree:
    """Return a new state with the boxes of the old one.

    Args:
      state: The old state.
      expected: The old state as its `init` returns it: only arrays in the tree of the
        parameters are in boxes, which are those of the parameters.
      fresh: The new state as its `init` returns it.
    """
    trees = (jax.tree.leaves(tree, is_leaf=_is_box) for tree in (state, expected))
    kinds = {
        _is_box(like): type(x)
        for x, like in zip(*trees, strict=True)
        if _is_box(x) and type(x) is not type(like)
    }

    def one(x: Any) -> Any:
        kind = kinds.get(_is_box(x)) or next(iter(kinds.values()))
        if not _is_box(x):
            return kind(x)
        # The metadata of the parameter, such as its sharding, is part of the structure.
        treedef = jax.tree.structure(x)
        data, make = (kind, treedef.node_data()[1]), treedef.from_node_data_and_children
        boxed = make(jax.tree_util.default_registry, data, treedef.children())
        return boxed.unflatten(jax.tree.leaves(x))

    return jax.tree.map(one, fresh, is_leaf=_is_box) if kinds else fresh


def _is_box(x: Any) -> bool:
    """Return whether a node has one child, in the place of a parameter in its box."""
    children = jax.tree.leaves_with_path(x, is_leaf=lambda y: y is not x)
    is_alone = [path for path, _ in children] == [(_leaves.IN_BOX,)]
    return is_alone and not isinstance(x, tuple)
