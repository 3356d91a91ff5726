"""Clip by any scope, norm and response, as a pure function."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._batching import Batched
from .._arrays._types import PyTree
from .._clip import (
    Clip,
    apply,
    clip_of,
    decide,
    fixed,
    layout_of,
)
from .._norms import Measured, NormLike, as_norm
from .._responses import Response, is_same_always, resolve
from .._scopes import ScopeLike, as_scope
from .._thresholds import Named
from .._typing import AxisName, Mask, Nonfinite, Number, ResponseLike

NEEDS_STATE = (
    "Rules and schedules need a state: pass them to the transformation, such as"
    " optclip.clip_by_global_norm(rule), in the optimizer."
)


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
    """Clip by any scope, norm and response.

    Each norm `n` of the tree is compared with its threshold `c`, and the elements that
    share the norm are multiplied by `response(n, c)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> from optclip.functional import clip_by
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> clipped, norms = clip_by(kernel, 1.0, over=optclip.axes(0), norm="l1")
      >>> print(norms)
      [[7. 1.]]

    Args:
      tree: Pytree of arrays.
      threshold: A number, an array that broadcasts to the norms, or a prefix tree of
        these with None for unclipped.
      over: Which elements share a norm: `"tree"` (default), `"leaf"`, `"element"`,
        `optclip.axes(...)`, `units(...)`, `groups(...)`, or another scope.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, an order p above 0,
        or an `optclip.norms.Norm`.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and the norms before clipping: a scalar for the tree, a dict by
      label for groups, otherwise a tree.

    Raises:
      ValueError: `threshold` is negative or NaN, or does not broadcast to the norms;
        `response` contains a schedule; or `norm` keeps a state.
    """
    how = resolved_without_step(response)
    measurement = as_norm(norm)
    if measurement.remembers:
        advice = "A pure function cannot keep the power-iteration vector between steps."
        wanted = "a norm with method='exact'"
        raise ValueError(_validate.must_be("norm", wanted, norm, advice))
    clip = clip_of(
        as_scope(over), measurement, how, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, threshold)


def resolved_without_step(response: ResponseLike) -> Response:
    """Return the response of an argument; raise if it contains a schedule."""
    how = resolve(response)
    if not is_same_always(how):
        advice = "A pure function has no step count; pass the value of the schedule."
        wanted = "a response without schedules"
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    return how


def run(
    clip: Clip,
    tree: PyTree,
    threshold: Number | PyTree,
    norms: Batched | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the clipped tree and its norms, computed unless `norms` are passed."""
    name, limits = "threshold", threshold
    if isinstance(threshold, Named):
        name, limits = threshold.name, threshold.value
    _validate.threshold_given(name, limits)
    raise_if_exchanged(name, tree, limits)
    for value in jax.tree.leaves(limits):
        _validate.number(name, value, rule_advice=NEEDS_STATE)
    layout, measured = layout_of(clip, tree), None if norms is None else Measured(norms)
    decision = decide(clip, layout, fixed({name: limits}), measured)
    clipped, _ = apply(decision)
    return clipped, layout.tree(decision.norms.entries())


def raise_if_exchanged(name: str, tree: PyTree, threshold: PyTree) -> None:
    """Raise if the tree is a number and the threshold is a tree."""
    is_number = _validate.is_number(tree) and not jnp.ndim(tree)
    is_tree = threshold is not None and not jax.tree_util.all_leaves([threshold])
    if is_number and (is_tree or getattr(threshold, "ndim", 0)):
        raise TypeError(
            f"The tree must come before `{name}`, got the number"
            f" {_validate.shown(tree)} and then a tree. Exchange the two arguments."
        )
