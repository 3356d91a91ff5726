"""Arrays of which `jax.vmap` has one per example for all or for none."""

from __future__ import annotations

from typing import Any

import jax

from optclip._arrays import _placement
from optclip._arrays._types import PyTree


def batched_alike(tree: PyTree) -> PyTree:
    """Return the tree; under `vmap` all of it is batched if one leaf is.

    The rule of a `jax.custom_vjp` whose inputs are batched in part is wrong if it mixes
    them: the cotangent of a shared output is summed over the examples on its way in,
    and the cotangent of the shared input once more on its way out.
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
    # Once more for a `vmap` around this one.
    return _batched(*filled), (True,) * len(leaves)


# JAX does not transpose `custom_vmap`. By this rule, whose tangents are batched by JAX,
# it has derivatives of any order in both modes.
_alike = jax.custom_jvp(_batched)
_alike.defjvp(lambda leaves, tangents: (_alike(*leaves), tangents))
