"""Clip a tree: lay out, decide, apply.

    layout = layout_of(clip, tree)
    decision = decide(clip, layout, fixed({"max_norm": 1.0}))
    clipped, coefficients = apply(decision)

`transforms` calls `decided` in place of `decide`: it measures with a memory, and its
thresholds come from rules. `decided` also serves callers that know the norms already.
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
from optclip.responses._interface import compares_norms

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
    return Decision(
        clip, layout, norms, fitted, thresholds.rule_memory, norm_memory, work
    )


def apply(decision: Decision) -> tuple[PyTree, Batched]:
    """Return the clipped tree and the coefficients."""
    _check(decision)
    leaves, coefficients = decision.clip.action.apply(decision)
    return decision.layout.rebuild(leaves), coefficients


def fixed(by_argument: dict[str, PyTree]) -> ThresholdFunction:
    """Return a function that computes thresholds independent of the norms.

    For functions without a state; in transformations, `transforms._rules` computes
    fixed thresholds too.

    Args:
      by_argument: A number, an array or a prefix tree of these, under the name of the
        argument that set it; `"lower"` and `"upper"` if elements have two bounds.
    """

    def thresholds_of(layout: Layout, norms: Batched) -> Thresholds:
        tree = layout.tree(norms.entries())
        return Thresholds(
            {
                name: layout.entries(_prefix.fill(name, threshold, tree))
                for name, threshold in by_argument.items()
            }
        )

    return thresholds_of


def _check(decision: Decision) -> None:
    """Raise as `nonfinite="raise"` requires, or if devices could clip differently.

    If a response compares the norms of one leaf, all devices must have the same ones.
    """
    clip, layout = decision.clip, decision.layout
    if clip.nonfinite == "raise":
        used = [leaf for leaf in layout.leaves if leaf.is_used]
        paths, arrays = [x.path for x in used], [x.array for x in used]
        _nonfinite.check(paths, arrays, decision.norms.entries())
    if compares_norms(clip.response):
        check_agreement(layout)


def check_agreement(layout: Layout) -> None:
    """Raise if devices must agree on the norms of slices, and may not.

    They may not if neither types nor `axis_name=` specify the axes that split a leaf.
    They must if there is a memory, a common decision, or a response that compares.
    """
    slices = [block for block in layout.blocks if block.axis is not None]
    if any(_leaves.axis_name_of(block.leaves[0]) != () for block in slices):
        _axis_names.check_all_known()


def clipped_norms(clip: Clip, name: str, norms: PyTree, thresholds: PyTree) -> PyTree:
    """Return the norms after clipping to thresholds, for `keep` of a threshold rule.

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
