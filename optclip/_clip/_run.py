"""The one way to clip: lay out, decide, apply.

layout = layout_of(clip, tree)
decision = decide(clip, layout, limit)
clipped, coefficients = apply(decision)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optclip._arrays import _axis_names, _leaves, _prefix
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree
from optclip._clip import _nonfinite
from optclip._clip._clip import Clip, Decision, Thresholds
from optclip._clip._coefficient import coefficients_of
from optclip._clip._layout import Layout, lay_out
from optclip.norms._interface import Measured
from optclip.responses._interface import compares

# From the layout and the norms to the thresholds.
Limit = Callable[[Layout, Batched], Thresholds]


def layout_of(clip: Clip, tree: PyTree) -> Layout:
    """Lay out a tree for a clip."""
    masks = clip.mask, clip.norm_mask, clip.clip_mask
    return lay_out(clip.scope, tree, masks, clip.axis_name)


def decide(clip: Clip, layout: Layout, limit: Limit) -> Decision:
    """Measure the blocks and fit the thresholds that `limit` returns for the norms."""
    return decide_measured(clip, layout, limit, clip.norm.measure(layout.blocks))


def decide_measured(
    clip: Clip, layout: Layout, limit: Limit, measured: Measured
) -> Decision:
    """Fit the thresholds for norms that are already known."""
    norms, norm_memory, work = measured
    thresholds = limit(layout, norms)
    fitted = clip.action.fit(clip, thresholds.by_argument, norms)
    return Decision(clip, layout, norms, fitted, thresholds.memory, norm_memory, work)


def apply(decision: Decision) -> tuple[PyTree, Batched]:
    """Return the clipped tree and the coefficients."""
    check_policy(decision)
    leaves, coefficients = decision.clip.action.apply(decision)
    return decision.layout.rebuild(leaves), coefficients


def fixed(name: str, threshold: PyTree) -> Limit:
    """Return the limit that is the same for all norms: a number or a prefix tree."""

    def limit(layout: Layout, norms: Batched) -> Thresholds:
        filled = _prefix.fill(name, threshold, layout.tree(norms.entries()))
        return Thresholds({name: layout.entries(filled)})

    return limit


def is_bad(norms: Batched) -> Batched:
    """Return whether each norm is not finite."""
    return norms.map(lambda norm: ~jnp.isfinite(norm))


def check_policy(decision: Decision) -> None:
    """Raise if the policy says so, or if devices could decide differently."""
    clip, layout = decision.clip, decision.layout
    if clip.nonfinite == "raise":
        live = [leaf for leaf in layout.leaves if leaf.is_live]
        _nonfinite.check([x.path for x in live], [x.array for x in live])
    if compares(clip.response):
        check_spans(layout)


def check_spans(layout: Layout) -> None:
    """Raise unless the devices that share the norms of slices are known."""
    slices = [block for block in layout.blocks if block.axis is not None]
    if any(_leaves.axis_name_of(block.leaves[0]) != () for block in slices):
        _axis_names.check_all_known()


def kept_norms(clip: Clip, norms: PyTree, thresholds: PyTree) -> PyTree:
    """Return the norms that the response would leave of those of a tree."""
    leaves, treedef = jax.tree.flatten(norms)
    batched = Batched(leaves)
    values = {"threshold": treedef.flatten_up_to(thresholds)}
    fitted = clip.action.fit(clip, values, batched)
    of_norms = clip.action.per_norm(fitted, batched)
    coefficients = coefficients_of(clip, batched, of_norms)
    return treedef.unflatten(
        batched.map(jnp.multiply, coefficients).entries(as_slices=True)
    )
