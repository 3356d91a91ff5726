"""Lay out a tree for clipping: its leaves, and the blocks that share a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from optclip._arrays import _axis_names, _leaves, _prefix, _sparse
from optclip._arrays._types import AxisName, KeyPath, Leaf, Mask, PyTree, TreeDef
from optclip.norms import Block
from optclip.scopes._interface import Groups, Scope, blocks_of, owners_of

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO

    from optclip._clip._clip import Clip


class LaidOutLeaf(NamedTuple):
    """Hold one leaf of the tree.

    Attributes:
      path: Its path.
      value: The leaf as passed: an array, a number or a BCOO matrix.
      array: The numbers to measure and scale; for a BCOO matrix its data, duplicates
        summed.
      matrix: The BCOO matrix that `array` is the data of, or None.
      block: The index of the block whose norm scales it, None if it is not scaled.
      is_used: Whether it is measured or scaled.
    """

    path: KeyPath
    value: Leaf
    array: Leaf
    matrix: BCOO | None
    block: int | None
    is_used: bool

    @property
    def like(self) -> jax.Array:
        """An array of the dtype and weak type in which the leaf is returned."""
        return _leaves.values(self.value)


class Layout(NamedTuple):
    """Hold the leaves of a tree, and its blocks.

    Attributes:
      flat: The tree, flattened.
      leaves: One entry per leaf.
      blocks: One entry per norm, or per leaf whose slices have norms.
      treedef: The structure of `scope.blocks(tree)`, which norms and thresholds share:
        one leaf for the tree, a tree for leaves, a dict for groups.
    """

    flat: _leaves.Flat
    leaves: list[LaidOutLeaf]
    blocks: list[Block]
    treedef: TreeDef

    def tree(self, values: Sequence[object]) -> PyTree:
        """Return one value per block, in the structure `treedef`."""
        return jax.tree.unflatten(self.treedef, values)

    def entries(self, tree: PyTree) -> list[PyTree]:
        """Return the values of a tree of that structure, one per block."""
        return self.treedef.flatten_up_to(tree)

    def rebuild(self, clipped: dict[int, Leaf]) -> PyTree:
        """Return the tree with some leaves replaced, by their index."""
        pairs = enumerate(self.leaves)
        return self.flat.rebuild([clipped.get(i, leaf.value) for i, leaf in pairs])

    def scaled(self) -> list[tuple[int, LaidOutLeaf, int]]:
        """Return the leaves that are scaled as (index, leaf, block)."""
        pairs = enumerate(self.leaves)
        return [(i, x, x.block) for i, x in pairs if x.block is not None]


def layout_of(clip: Clip, tree: PyTree) -> Layout:
    """Lay out a tree for a clipping operation."""
    masks = clip.mask, clip.norm_mask, clip.clip_mask
    return lay_out(clip.scope, tree, masks, clip.axis_name)


def lay_out(
    scope: Scope,
    tree: PyTree,
    masks: tuple[Mask | None, Mask | None, Mask | None] = (None, None, None),
    axis_name: AxisName | None = None,
) -> Layout:
    """Find the blocks of a tree and the block of each leaf.

    Args:
      scope: The elements that share a norm.
      tree: Any pytree.
      masks: `mask`, `norm_mask` and `clip_mask`.
      axis_name: The mapped axes that leaves are declared to be split over.
    """
    flat = _leaves.flatten(tree)
    are_clippable = flat.clippable()
    names = ("mask", "norm_mask", "clip_mask")
    in_mask, in_norm_mask, in_clip_mask = (
        _prefix.spread_mask(name, mask, flat, are_clippable)
        for name, mask in zip(names, masks, strict=True)
    )
    if isinstance(scope, Groups):
        # A user's function of the tree must receive the leaves, not the wrappers below.
        scope = scope.labeled(flat.tree)
    declared = _axis_names.by_leaf(axis_name, flat)
    clippable = [
        _sparse.unwrapped(x, name) if is_clippable else None
        for x, name, is_clippable in zip(
            flat.leaves, declared, are_clippable, strict=True
        )
    ]
    clippable = _each_its_own(clippable)
    measured_tree = flat.rebuild(_where(in_mask, _where(in_norm_mask, clippable)))
    scaled_tree = flat.rebuild(_where(in_mask, _where(in_clip_mask, clippable)))
    blocks, treedef = blocks_of(scope, measured_tree)
    index = jax.tree.unflatten(treedef, list(range(len(blocks))))
    owner = owners_of(scope, index, scaled_tree, flat.treedef)
    measured_ids = {id(x) for block in blocks for x in block.leaves}
    leaves = []
    for path, value, x, block in zip(
        flat.paths, flat.leaves, clippable, owner, strict=True
    ):
        is_used = block is not None or (x is not None and id(x) in measured_ids)
        array, matrix = _leaves.unwrap(x), _leaves.matrix_of(x)
        if is_used:
            _axis_names.check_reduced(path, array)
        leaves.append(LaidOutLeaf(path, value, array, matrix, block, is_used))
    return Layout(flat, leaves, blocks, treedef)


def _each_its_own(leaves: list[Leaf]) -> list[Leaf]:
    """Wrap an array that occurs twice, since `lay_out` finds leaves by `id`.

    Wrapped leaves are new objects, so only bare arrays can repeat.
    """
    earlier: set[int] = set()
    out = list(leaves)
    for i, x in enumerate(leaves):
        if x is not None and id(x) in earlier:
            out[i] = _leaves.Wrapped(x)
        earlier.add(id(x))
    return out


def _where(mask: list[bool], leaves: list[Leaf]) -> list[Leaf]:
    return [x if m else None for m, x in zip(mask, leaves, strict=True)]
