"""`record="leaves"` of a clip with one norm: the norm of each leaf beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _by_path, _leaves
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree, TreeDef
from optclip._clip._clip import Clip
from optclip._clip._layout import Layout
from optclip.norms import Block, _measure, _roots
from optclip.scopes._scope import LEAF

LeafNorms = dict[str, jax.Array] | jax.Array


def by_leaf(clip: Clip[Any, Any]) -> Clip[Any, Any]:
    """The clip that measures each leaf of what this one measures."""
    return dataclasses.replace(clip, scope=LEAF)


def blank(treedef: TreeDef) -> LeafNorms:
    """The norms before the first step."""
    zeros = [jnp.zeros((), jnp.float32) for _ in range(treedef.num_leaves)]
    return _by_path.keyed(treedef, zeros)


def measure(
    clip: Clip[Any, Any], layout: Layout, updates: PyTree
) -> tuple[Batched, LeafNorms]:
    """The norm of the tree, and of each leaf by its path.

    The gradients are read once: the norm of all is the norm of the norms.
    """
    apart = by_leaf(clip)
    leaves = apart.layout(updates)
    found = apart.measure(leaves, flushed=False)
    flushed = found.map(_roots.large_enough).entries()
    kept = _by_path.keyed(leaves.treedef, flushed)
    if clip.norm.per_count:
        # A mean of means is not the mean.
        return clip.measure(layout), kept
    # Each spans its devices already.
    block = Block([_leaves.wrap(norm, ()) for norm in found.entries()])
    return _measure.measure_batched([block], clip.norm), kept
