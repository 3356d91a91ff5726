"""Parse the arguments that bound the contribution of one example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._scopes import LEAF, TREE, Groups, Scope, as_scope, declaring
from ._example_clip import Bound
from ._responses import response_of


def bound_of(
    threshold: Any,
    over: Any,
    response: Any,
    nonfinite: str,
    strict: bool,
    normalize_by: Any,
    max_weight: Any = None,
) -> Bound:
    """Return the validated bound that a user's arguments specify."""
    scope = declaring(_scope(over), threshold)
    _check_threshold(threshold, scope)
    _validate.plain("normalize_by", normalize_by, above=True)
    is_unit = isinstance(response, str) and response == "unit"
    how = response_of(response)
    if max_weight is not None:
        _check_max_weight(max_weight)
    bound = Bound(
        threshold, scope, how, nonfinite, strict, normalize_by, is_unit, max_weight
    )
    bound.clip()
    return bound


def _scope(over: Any) -> Scope:
    wanted = "'tree', 'leaf' or optclip.groups(...)"
    try:
        scope = as_scope(over)
    except TypeError:
        raise TypeError(_validate.must_be("over", wanted, over)) from None
    if scope not in (TREE, LEAF) and not isinstance(scope, Groups):
        raise ValueError(_validate.must_be("over", wanted, over))
    return scope


_RULE_ADVICE = (
    "For a threshold that follows the norms, pass `threshold` of the state of"
    " per_example.QuantileThreshold. In clipped_grad, the loss comes first."
)


def _check_threshold(threshold: Any, scope: Scope) -> None:
    _validate.threshold_given("threshold", threshold)
    for value in jax.tree.leaves(threshold):
        _validate.number("threshold", value, rule_advice=_RULE_ADVICE)
        if jnp.shape(value):
            wanted = "one number for each norm"
            advice = f"Its shape is {jnp.shape(value)}."
            advice += " For one per example, pass thresholds= in the call."
            message = _validate.must_be("threshold", wanted, value, advice)
            raise ValueError(message)
    if scope == TREE and not _validate.is_number(threshold):
        wanted = "one number for over='tree'"
        advice = "Pass over='leaf' or over=optclip.groups(...) for several."
        raise ValueError(_validate.must_be("threshold", wanted, threshold, advice))


def _check_max_weight(max_weight: Any) -> None:
    advice = "inf does not limit the weights."
    _validate.number("max_weight", max_weight, advice=advice)
    if jnp.shape(max_weight):
        wanted = "one number for all examples"
        advice = "Pass the weights of the examples in the call, weights=."
        raise ValueError(_validate.must_be("max_weight", wanted, max_weight, advice))
