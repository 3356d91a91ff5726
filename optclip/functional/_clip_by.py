"""The pure clip by any norm: any threshold, scope, norm and response."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree
from optclip._clip import (
    Clip,
    apply,
    clip_of,
    decide,
    decided,
    fixed,
    layout_of,
)
from optclip.norms._interface import Measured, NormLike, as_norm
from optclip.responses._interface import is_same_always, resolve
from optclip.scopes._interface import ScopeLike, as_scope
from optclip.thresholds._interface import Named
from optclip.typing import AxisName, Mask, Nonfinite, Number, ResponseLike


def clip_by(
    tree: PyTree,
    threshold: Number | PyTree,
    *,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, PyTree]:
    r"""Any clip by a norm: measure, respond, apply.

    .. math:: x \leftarrow x \cdot \mathrm{response}(\|x\|_{over}, threshold)

    Args:
      tree: any pytree of arrays.
      threshold: where to clip: a number, an array that broadcasts to the norms, or a
        prefix tree of these with None for what is not clipped. 0 clips to zero, inf
        clips nothing.
      over: what shares a norm: `"tree"`, `"leaf"`, `"element"`, `optclip.axes(...)`,
        `units(...)`, `groups(...)`, or a scope of your own.
      norm: which norm: `"l2"`, `"l1"`, `"inf"`, `"rms"`, `"average"`, any order p above
        0, or an `optclip.norms.Norm`.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

    Returns:
      A tree like `tree`, and the norms before the clip in the structure of the scope:
      a scalar for the tree, a dict by label for groups, a tree for the others.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: `threshold` is negative or NaN, or fits no norm; `response` has a
        schedule in it, for which a pure function has no step.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> from optclip.functional import clip_by
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> clipped, norms = clip_by(kernel, 1.0, over=optclip.axes(0), norm="l1")
      >>> print(norms)
      [[7. 1.]]
    """
    how = resolve(response)
    if not is_same_always(how):
        advice = "A pure function has no step: give the value of the schedule."
        wanted = "without a schedule in it"
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    measurement = as_norm(norm)
    if measurement.remembers:
        advice = "A pure function remembers no vector from the step before."
        wanted = "with method='exact'"
        raise ValueError(_validate.must_be("norm", wanted, norm, advice))
    clip = clip_of(
        as_scope(over), measurement, how, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, threshold)


def run(
    clip: Clip,
    tree: PyTree,
    threshold: Any,
    norms: Batched | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the clipped tree and its norms, computed unless `norms` are passed."""
    name, limits = "threshold", threshold
    if isinstance(threshold, Named):
        name, limits = threshold.name, threshold.value
    _validate.not_none(name, limits)
    raise_if_exchanged(name, tree, limits)
    for value in jax.tree.leaves(limits):
        _validate.number(name, value)
    layout, thresholds_of = layout_of(clip, tree), fixed(name, limits)
    if norms is None:
        decision = decide(clip, layout, thresholds_of)
    else:
        decision = decided(clip, layout, Measured(norms), thresholds_of(layout, norms))
    clipped, _ = apply(decision)
    return clipped, layout.tree(decision.norms.entries())


def raise_if_exchanged(name: str, tree: PyTree, threshold: PyTree) -> None:
    """Raise if what should be the tree is a number and the threshold a tree."""
    is_number = _validate.is_number(tree) and not jnp.ndim(tree)
    is_tree = threshold is not None and not jax.tree_util.all_leaves([threshold])
    if is_number and (is_tree or getattr(threshold, "ndim", 0)):
        raise TypeError(
            f"The tree must come first, then `{name}`, got the number"
            f" {_validate.shown(tree)} and then a tree. Exchange the two arguments."
        )
