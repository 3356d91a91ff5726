"""Clip a tree: lay out, decide, apply.

    layout = layout_of(clip, tree)
    decision = decide(clip, layout, fixed("max_norm", 1.0))
    clipped, coefficients = apply(decision)

If the norms are already known, or are measured with a memory as in `transforms`,
`decided` replaces `decide`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optclip._arrays import _axis_names, _leaves, _prefix
from optclip._arrays._batching import Batched
from optclip._arrays._packed_state import PerNorm
from optclip._arrays._types import Number, PyTree
from optclip._clip import _nonfinite
from optclip._clip._clip import Clip, Decision, Thresholds
from optclip._clip._coefficient import coefficients_of
from optclip._clip._layout import Layout
from optclip.norms._interface import Measured
from optclip.responses._interface import compares

# Computes the thresholds from the layout and the norms.
ThresholdFunction = Callable[[Layout, Batched], Thresholds]


def decide(clip: Clip, layout: Layout, thresholds_of: ThresholdFunction) -> Decision:
    """Measure the blocks and decide where to clip them."""
    measured = clip.norm.measure(layout.blocks)
    return decided(clip, layout, measured, thresholds_of(layout, measured.norms))


def decided(
    clip: Clip, layout: Layout, measured: Measured, thresholds: Thresholds
) -> Decision:
    """Return the decision for known norms, with the thresholds fitted to them."""
    norms, norm_memory, work = measured
    fitted = clip.action.fit(clip, thresholds.by_argument, norms)
    return Decision(clip, layout, norms, fitted, thresholds.memory, norm_memory, work)


def apply(decision: Decision) -> tuple[PyTree, Batched]:
    """Return the clipped tree and the coefficients."""
    _check(decision)
    leaves, coefficients = decision.clip.action.apply(decision)
    return decision.layout.rebuild(leaves), coefficients


def fixed(name: str, threshold: PyTree) -> ThresholdFunction:
    """Return a function that computes thresholds independent of the norms.

    Args:
      name: The argument that `threshold` was passed as.
      threshold: A number, an array or a prefix tree of these.
    """

    def thresholds_of(layout: Layout, norms: Batched) -> Thresholds:
        filled = _prefix.fill(name, threshold, layout.tree(norms.entries()))
        return Thresholds({name: layout.entries(filled)})

    return thresholds_of


def _check(decision: Decision) -> None:
    """Raise as `nonfinite="raise"` requires, or if devices could clip differently."""
    clip, layout = decision.clip, decision.layout
    if clip.nonfinite == "raise":
        used = [leaf for leaf in layout.leaves if leaf.is_used]
        paths, arrays = [x.path for x in used], [x.array for x in used]
        _nonfinite.check(paths, arrays, decision.norms.entries())
    if compares(clip.response):
        check_spans(layout)


def check_spans(layout: Layout) -> None:
    """Raise unless the devices that share the norms of slices are known."""
    slices = [block for block in layout.blocks if block.axis is not None]
    if any(_leaves.axis_name_of(block.leaves[0]) != () for block in slices):
        _axis_names.check_all_known()


def clipped_norms(clip: Clip, name: str, norms: PyTree, thresholds: PyTree) -> PyTree:
    """Return the norms after clipping to thresholds.

    Args:
      clip: The clipping operation.
      name: The argument that sets the threshold.
      norms: A tree of norms, or a `PerNorm` of one vector of them.
      thresholds: A tree like `norms`.
    """
    leaves, treedef = jax.tree.flatten(norms)
    values: dict[str, list[Number] | Batched]
    if isinstance(norms, PerNorm):
        batched = Batched.of_vector(*leaves)
        values = {name: Batched.of_vector(*jax.tree.leaves(thresholds))}
    else:
        batched = Batched(leaves)
        values = {name: treedef.flatten_up_to(thresholds)}
    fitted = clip.action.fit(clip, values, batched)
    of_norms = clip.action.per_norm(fitted, batched)
    coefficients = coefficients_of(clip, batched, of_norms)
    clipped = batched.map(jnp.multiply, coefficients)
    if isinstance(norms, PerNorm):
        return treedef.unflatten(clipped.values)
    return treedef.unflatten(clipped.entries(as_slices=True))
