"""Build a `Clip` from a user's scope, norm and response."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from optclip._arrays import _validate
from optclip._arrays._types import AxisName, Mask, Number
from optclip._clip._action import Action
from optclip._clip._clip import Clip
from optclip._clip._move import MOVE
from optclip._clip._scale import SCALE
from optclip.norms._interface import Measurement
from optclip.responses import Response
from optclip.scopes._interface import EachElement, Scope


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
def _(scope: EachElement, norm: Measurement, response: Response, eps: Number) -> Parts:
    del scope
    # Bounds have no place for `eps`, which only coefficients read.
    known = _validate.concrete(eps)
    has_eps = known is None or np.any(known != 0)
    moves = hasattr(response, "element") and not has_eps
    return Parts(norm, MOVE if moves else SCALE)


def clip_of(
    scope: Scope,
    norm: Measurement,
    response: Response,
    *,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    mask: Mask | None = None,
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> Clip:
    """Build the `Clip` for a scope; options are as the user passed them."""
    parts = parts_of(scope, norm, response, eps)
    if strict and not parts.norm.is_entrywise:
        wanted = "False for spectral norms and singular values"
        advice = "Elements are rounded one by one, which can increase a singular value."
        raise ValueError(_validate.must_be("strict", wanted, strict, advice))
    return Clip(
        scope, parts.norm, response, parts.action, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name,
    )  # fmt: skip
