"""A tree laid out for a clip: what is measured, what scaled, by whose norm."""

from typing import Any, NamedTuple

import jax

from optclip import _leaves, _mapped, _trees
from optclip.norms import Block
from optclip.scopes._scope import Scope, blocks_of, owners_of


class Opened(NamedTuple):
    """A tree laid out for a clip: blocks to measure, and each leaf's block.

    `owner` is the block that scales each leaf, `seen` the leaves that are measured or
    scaled.
    """

    flat: _leaves.Flat
    leaves: list[Any]
    blocks: list[Block]
    treedef: Any
    owner: list[int | None]
    seen: list[int]

    def tree(self, values: list[Any]) -> Any:
        """One value a block, in the structure of the scope."""
        return jax.tree.unflatten(self.treedef, values)

    def entries(self, tree: Any) -> list[Any]:
        """The values of a tree of that structure, one a block."""
        return self.treedef.flatten_up_to(tree)

    def owned(self) -> list[tuple[int, int]]:
        """The leaves that are scaled, as (leaf, block)."""
        return [(i, block) for i, block in enumerate(self.owner) if block is not None]


def opened_by(
    scope: Scope, tree: Any, norm_mask: Any, clip_mask: Any, axis_name: Any
) -> Opened:
    """Which leaves are measured, which are scaled, and by whose norm."""
    flat = _leaves.flatten(tree)
    live = flat.clippable()
    # This one first: a leaf clip has one mask for both, which users know as this.
    scaled = _trees.spread_mask("clip_mask", clip_mask, tree)
    counted = _trees.spread_mask("norm_mask", norm_mask, tree)
    told = _mapped.by_leaf(axis_name, tree)
    held = map(_leaves.hold, flat.leaves, told)
    leaves = _where(live, list(held))
    measured_tree = flat.rebuild(_where(counted, leaves))
    scaled_tree = flat.rebuild(_where(scaled, leaves))
    blocks, treedef = blocks_of(scope, measured_tree)
    index = jax.tree.unflatten(treedef, list(range(len(blocks))))
    owner = owners_of(scope, index, scaled_tree, flat.treedef)
    measured = {id(x) for block in blocks for x in block.leaves}
    seen = [
        i
        for i, leaf in enumerate(leaves)
        if owner[i] is not None or (leaf is not None and id(leaf) in measured)
    ]
    for i in seen:
        _mapped.check_reduced(flat.paths[i], flat.leaves[i])
    return Opened(flat, flat.leaves, blocks, treedef, owner, seen)


def _where(mask: list[bool], leaves: list[Any]) -> list[Any]:
    return [x if m else None for m, x in zip(mask, leaves, strict=True)]
