"""Checks of the arguments of pure functions, and the run that these functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._batching import Batched
from .._arrays._numerics import as_array
from .._clip import Clip, apply, decide, layout_of
from .._norms import Measured, flush_small
from .._responses import BaseResponse, as_response, is_same_always
from .._thresholds import Named
from .._typing import Number, PyTree, ResponseLike
from ._integers import raise_if_data

P = ParamSpec("P")
T = TypeVar("T")

_NEEDS_STATE = (
    "Rules and schedules need a state: pass them to the transformation, such as"
    " optclip.clip_by_global_norm(rule), in the optimizer."
)


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
    check_bound(name, limits)
    layout = layout_of(clip, tree)
    raise_if_data(tree)
    measured = clip.norm.measure(layout.blocks) if norms is None else Measured(norms)
    decision = decide(clip, layout, measured, {name: layout.fill(name, limits)})
    clipped, _ = apply(decision)
    return clipped, layout.tree(decision.norms.entries())


def resolved_without_step(response: ResponseLike) -> BaseResponse:
    """Return the response of an argument; raise if it contains a schedule."""
    how = as_response(response)
    if not is_same_always(how):
        advice = "A pure function has no step count; pass the value of the schedule."
        wanted = "a response without schedules"
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    return how


def raise_if_exchanged(name: str, tree: PyTree, threshold: PyTree) -> None:
    """Raise if the tree is a number and the threshold is a tree."""
    is_number = _validate.is_number(tree) and not jnp.ndim(tree)
    is_tree = threshold is not None and not jax.tree_util.all_leaves([threshold])
    if is_number and (is_tree or getattr(threshold, "ndim", 0)):
        raise TypeError(
            f"The tree must come before `{name}`, got the number"
            f" {_validate.shown(tree)} and then a tree. Exchange the two arguments."
        )


def passed_norm(norm: Number | None, *, strict: bool) -> Batched | None:
    """Return the checked `use_norm`, None to compute the norm."""
    if norm is None:
        return None
    if strict:
        raise ValueError(
            "strict=True cannot be combined with use_norm=, since the rounding error"
            " of the passed norm is unknown. Remove one of them."
        )
    wanted = "a real scalar of at least 0, the norm of the tree, or None to compute it"
    _validate.passed_norm("use_norm", norm, wanted)
    scalar = as_array(norm)
    return Batched([flush_small(scalar)])


def check_bound(name: str, bound: PyTree, *, negative: bool = False) -> None:
    """Raise unless the entries of a threshold argument are numbers."""
    for value in jax.tree.leaves(bound):
        _validate.number(name, value, negative=negative, rule_advice=_NEEDS_STATE)


def checks_limit(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` reject `limit=` together with `upper`.

    By position, the same argument is the lower bound, as in `tf.clip_by_value`.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        limit, upper = kwargs.get("limit"), kwargs.get("upper")
        if limit is not None and upper is not None:
            _validate.is_two_sided(limit, kwargs.get("lower"), upper)
        return function(*args, **kwargs)

    return checked
