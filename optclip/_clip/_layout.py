"""A tree laid out for a clip: what is measured, what scaled, by whose norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from optclip._arrays import _axis_names, _leaves, _prefix, _sparse
from optclip._arrays._types import AxisName, Leaf, Mask, PyTree, TreeDef
from optclip.norms import Block
from optclip.scopes._groups import Groups
from optclip.scopes._scope import Scope, blocks_of, owners_of

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


class Layout(NamedTuple):
    """A tree laid out for a clip: blocks to measure, and each leaf's block.

    `leaves` are those of the tree, `arrays` what the clip has for them. `owner` is the
    block that scales each leaf, `seen` the leaves that are measured or scaled.
    """

    flat: _leaves.Flat
    leaves: list[Leaf]
    arrays: list[Any]
    matrices: dict[int, BCOO]
    blocks: list[Block]
    treedef: TreeDef
    owner: list[int | None]
    seen: list[int]

    def tree(self, values: list[Any]) -> PyTree:
        """One value a block, in the structure of the scope."""
        return jax.tree.unflatten(self.treedef, values)

    def entries(self, tree: PyTree) -> list[Any]:
        """The values of a tree of that structure, one a block."""
        return self.treedef.flatten_up_to(tree)

    def like(self, i: int) -> jax.Array:
        """The numbers of a leaf as they came, in whose dtype it is returned."""
        return _leaves.values(self.leaves[i])

    def rebuild(self, clipped: dict[int, Leaf]) -> PyTree:
        """The tree with some of its leaves clipped."""
        return self.flat.rebuild([clipped.get(i, x) for i, x in enumerate(self.leaves)])

    def owned(self) -> list[tuple[int, int]]:
        """The leaves that are scaled, as (leaf, block)."""
        return [(i, block) for i, block in enumerate(self.owner) if block is not None]


def layout_of(
    scope: Scope,
    tree: PyTree,
    mask: Mask | None,
    norm_mask: Mask | None,
    clip_mask: Mask | None,
    axis_name: AxisName | None,
) -> Layout:
    """Which leaves are measured, which are scaled, and by whose norm."""
    flat = _leaves.flatten(tree)
    live = flat.clippable()
    masks = {"mask": mask, "norm_mask": norm_mask, "clip_mask": clip_mask}
    taken, counted, scaled = (
        _prefix.spread_mask(name, given, flat, live) for name, given in masks.items()
    )
    if isinstance(scope, Groups):
        # A user's function of the tree must not receive what stands for leaves below.
        scope = scope.labeled(flat.tree)
    declared = _axis_names.by_leaf(axis_name, flat)
    shown = [
        _sparse.unwrapped(x, name) if is_live else None
        for x, name, is_live in zip(flat.leaves, declared, live, strict=True)
    ]
    shown = _each_its_own(shown)
    measured_tree = flat.rebuild(_where(taken, _where(counted, shown)))
    scaled_tree = flat.rebuild(_where(taken, _where(scaled, shown)))
    blocks, treedef = blocks_of(scope, measured_tree)
    index = jax.tree.unflatten(treedef, list(range(len(blocks))))
    owner = owners_of(scope, index, scaled_tree, flat.treedef)
    measured = {id(x) for block in blocks for x in block.leaves}
    seen = [
        i
        for i, leaf in enumerate(shown)
        if owner[i] is not None or (leaf is not None and id(leaf) in measured)
    ]
    arrays = [_leaves.unwrap(x) for x in shown]
    for i in seen:
        _axis_names.check_reduced(flat.paths[i], arrays[i])
    matrices = {i: _leaves.matrix_of(x) for i, x in enumerate(shown)}
    matrices = {i: matrix for i, matrix in matrices.items() if matrix is not None}
    return Layout(flat, flat.leaves, arrays, matrices, blocks, treedef, owner, seen)


def _each_its_own(shown: list[Leaf]) -> list[Leaf]:
    """The leaves, an array that stands at two paths as two of their own."""
    known: set[int] = set()
    out = list(shown)
    for i, x in enumerate(shown):
        if x is not None and id(x) in known:
            out[i] = _leaves.Wrapped(_leaves.unwrap(x), _leaves.axis_name_of(x))
        known.add(id(x))
    return out


def _where(mask: list[bool], leaves: list[Leaf | None]) -> list[Leaf | None]:
    return [x if m else None for m, x in zip(mask, leaves, strict=True)]
