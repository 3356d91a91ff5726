"""Record the norm of each leaf for global-norm clipping, `record="leaves"`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _packed_state
from optclip._arrays._types import PyTree, TreeDef
from optclip._clip import Clip, Layout, layout_of
from optclip.norms import Block
from optclip.norms._interface import Measured, flush_small
from optclip.scopes._interface import LEAF

LeafNorms = dict[str, jax.Array] | jax.Array


def by_leaf(clip: Clip) -> Clip:
    """Return the operation that measures each leaf of the same tree."""
    return dataclasses.replace(clip, scope=LEAF)


def blank(treedef: TreeDef) -> LeafNorms:
    """Return the norms before the first step."""
    zeros = [jnp.zeros((), jnp.float32) for _ in range(treedef.num_leaves)]
    return _packed_state.keyed(treedef, zeros)


def measure(clip: Clip, layout: Layout, updates: PyTree) -> tuple[Measured, LeafNorms]:
    """Return the norm of the tree, and of each leaf by its path.

    The gradients are read once, unless the norm is a mean: the norm of all leaves is
    the norm of their norms.
    """
    leaves = layout_of(by_leaf(clip), updates)
    norms = clip.norm.measure(leaves.blocks, flushed=False).norms
    flushed = norms.map(flush_small).entries()
    leaf_norms = _packed_state.keyed(leaves.treedef, flushed)
    if clip.norm.is_a_mean:
        # The mean is computed from all elements, since a mean of means differs from it.
        return clip.norm.measure(layout.blocks), leaf_norms
    # Each norm already spans its devices.
    block = Block([_leaves.wrap(norm, ()) for norm in norms.entries()])
    return clip.norm.measure([block]), leaf_norms
