"""Batch arrays alike under `jax.vmap`: all of them, or none."""

from __future__ import annotations

from typing import Any

import jax

from . import _placement
from ._types import PyTree


def batched_alike(tree: PyTree) -> PyTree:
    """Return the tree; under `vmap` all leaves are batched if one is.

    The rule of a `jax.custom_vjp` with partly batched inputs is wrong if it mixes them:
    the cotangent of a shared output is summed over the examples when it enters, and the
    cotangent of the shared input is summed again when it leaves.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) < 2:
        return tree
    return treedef.unflatten(_alike(*leaves))


@jax.custom_batching.custom_vmap
def _batched(*leaves: Any) -> tuple[Any, ...]:
    return leaves


@_batched.def_vmap
def _batch(axis_size: int, are_batched: list[bool], *leaves: Any) -> Any:
    del axis_size
    like = leaves[are_batched.index(True)]
    filled = [
        x if is_batched else _placement.stacked_as(x, like)
        for x, is_batched in zip(leaves, are_batched, strict=True)
    ]
    # The recursive call handles an enclosing `vmap`.
    return _batched(*filled), (True,) * len(leaves)


# JAX does not transpose `custom_vmap`. This rule, whose tangents JAX batches, gives it
# derivatives of any order in both modes.
_alike = jax.custom_jvp(_batched)
_alike.defjvp(lambda leaves, tangents: (_alike(*leaves), tangents))
