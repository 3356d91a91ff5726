"""Lay out a tree for clipping: its leaves, and the blocks that share a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from .._arrays import _axis_names, _leaves, _memory, _prefix
from .._arrays._leaf import Leaf
from .._arrays._types import AxisName, Mask, Number, PyTree, TreeDef
from .._norms import Block
from .._scopes import Groups, Scope, blocks_of, owners_of


class Layout(NamedTuple):
    """Hold the leaves of a tree, and its blocks.

    Attributes:
      flat: The tree, flattened.
      leaves: Its leaves; None where a leaf is not clippable.
      owners: The index of the block whose coefficient scales each leaf, or None.
      scaled: The leaves that are scaled as (index, leaf, block).
      blocks: The elements that share each norm.
      treedef: The structure of the norms.
    """

    flat: _leaves.Flat
    leaves: list[Leaf | None]
    owners: list[int | None]
    scaled: list[tuple[int, Leaf, int]]
    blocks: list[Block]
    treedef: TreeDef

    def tree(self, values: Sequence[object]) -> PyTree:
        """Return one value per block, in the structure `treedef`."""
        return jax.tree.unflatten(self.treedef, values)

    def entries(self, tree: PyTree) -> list[PyTree]:
        """Return the values of a tree of that structure, one per block."""
        return self.treedef.flatten_up_to(tree)

    def fill(self, name: str, prefix: PyTree) -> list[Number]:
        """Return one threshold per block, from a prefix of the tree of norms."""
        blocks = self.tree(range(len(self.blocks)))
        return self.entries(_prefix.fill(name, prefix, blocks))

    def rebuild(self, clipped: dict[int, object]) -> PyTree:
        """Return the tree with some leaves replaced, by their index.

        Each leaf is in the memory, of the host or the device, in which it was passed.
        """
        leaves = list(self.flat.leaves)
        for i, new in clipped.items():
            leaves[i] = _memory.back(new, leaves[i])
        return self.flat.rebuild(leaves)

    def used(self) -> list[Leaf]:
        """Return the leaves that are measured or scaled."""
        measured = {x for block in self.blocks for x in block.leaves}
        pairs = zip(self.leaves, self.owners, strict=True)
        return [x for x, owner in pairs if x and (owner is not None or x in measured)]


def lay_out(
    scope: Scope,
    tree: PyTree,
    masks: tuple[Mask | None, Mask | None, Mask | None] = (None, None, None),
    axis_name: AxisName | None = None,
) -> Layout:
    """Find the blocks of a tree and the block of each leaf.

    Args:
      scope: The scope of the norms.
      tree: The tree.
      masks: `mask=`, `norm_mask=` and `clip_mask=`.
      axis_name: The declared mapped axes.
    """
    flat = _leaves.flatten(tree)
    are_clippable = flat.clippable()
    names = ("mask", "norm_mask", "clip_mask")
    in_mask, in_norm_mask, in_clip_mask = (
        _prefix.spread_mask(name, mask, flat, are_clippable)
        for name, mask in zip(names, masks, strict=True)
    )
    if isinstance(scope, Groups):
        # A user's function of the tree must receive its leaves, not `Leaf` objects.
        scope = scope.labeled(flat.tree)
    declared = _axis_names.by_leaf(axis_name, flat)
    columns = flat.paths, flat.leaves, declared, are_clippable
    leaves = [
        Leaf.of(x, path, name) if is_clippable else None
        for path, x, name, is_clippable in zip(*columns, strict=True)
    ]
    to_measure = _selected(leaves, in_mask, in_norm_mask)
    to_scale = _selected(leaves, in_mask, in_clip_mask)
    blocks, treedef = blocks_of(scope, flat.rebuild(to_measure))
    index = jax.tree.unflatten(treedef, list(range(len(blocks))))
    owners = owners_of(scope, index, flat.rebuild(to_scale), flat.treedef)
    # A custom scope may return a block for a leaf that the masks exclude.
    owners = [None if x is None else i for x, i in zip(to_scale, owners, strict=True)]
    triples = zip(range(len(owners)), to_scale, owners, strict=True)
    scaled = [(i, x, block) for i, x, block in triples if x and block is not None]
    layout = Layout(flat, leaves, owners, scaled, blocks, treedef)
    for leaf in layout.used():
        _axis_names.check_reduced(leaf.path, leaf.array)
    return layout


def _selected(leaves: list[Leaf | None], *masks: list[bool]) -> list[Leaf | None]:
    """Return the leaves that are in all masks, None for others."""
    return [x if all(row) else None for x, *row in zip(leaves, *masks, strict=True)]
