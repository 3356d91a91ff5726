"""Build a `Clip` from a user's scope, norm and response."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from optclip._arrays import _validate
from optclip._arrays._types import Number
from optclip._clip._action import Action
from optclip._clip._clip import Clip
from optclip._clip._move import MOVE
from optclip._clip._scale import SCALE
from optclip.norms._interface import Measurement
from optclip.responses import Response
from optclip.scopes._interface import Element, Scope


class Parts(NamedTuple):
    """Hold the measurement and the action."""

    norm: Measurement
    action: Action


@functools.singledispatch
def parts_of(scope: Scope, norm: Measurement, response: Response, eps: Number) -> Parts:
    """Choose the measurement and the action; other packages register their scopes."""
    del scope, response, eps
    return Parts(norm, SCALE)


@parts_of.register
def _(scope: Element, norm: Measurement, response: Response, eps: Number) -> Parts:
    del scope, eps
    return Parts(norm, MOVE if hasattr(response, "element") else SCALE)


def clip_of(
    scope: Scope,
    norm: Measurement,
    response: Response,
    *,
    eps: Number = 0.0,
    strict: bool = False,
    **options: Any,
) -> Clip:
    """Build the `Clip` for a scope, with checked arguments.

    Args:
      scope: The elements that share a norm.
      norm: The norm.
      response: The response.
      eps: As the user passed it.
      strict: As the user passed it.
      **options: The other fields of `Clip`, as the user passed them.
    """
    parts = parts_of(scope, norm, response, eps)
    if strict and not parts.norm.is_entrywise:
        advice = "Elements are rounded one by one, which can increase a singular value."
        raise ValueError(_validate.must_be("strict", "False", strict, advice))
    return Clip(
        scope, parts.norm, response, parts.action, eps=eps, strict=strict, **options
    )
