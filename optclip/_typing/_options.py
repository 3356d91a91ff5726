"""Types of the options that recipes pass on."""

from __future__ import annotations

from typing import Literal, TypedDict

from .._arrays._types import AxisName, Mask, Nonfinite, Number, Record
from .._norms import NormLike
from .._responses import ResponseLike
from .._scopes import ScopeLike
from .._thresholds import Threshold


class MomentClipOptions(TypedDict, total=False):
    """Describe `ClipOptions` without `eps`, for recipes that have their own `eps`."""

    over: ScopeLike
    norm: NormLike
    response: ResponseLike
    strict: bool
    nonfinite: Nonfinite
    mask: Mask | None
    axis_name: AxisName | None
    record: Record
    name: str


class ClipOptions(MomentClipOptions, total=False):
    """Describe the options of `clip_by` that recipes pass on.

    A recipe sets some of them itself and raises TypeError if such an option is passed.
    `norm_mask` and `clip_mask` are options of `clip_by` alone.
    """

    eps: Number


class SkipOptions(TypedDict, total=False):
    """Describe the options of `skip` that recipes pass on."""

    max_loss: Threshold | None
    over: ScopeLike
    norm: NormLike
    max_consecutive: float | None
    learn_skipped: bool | None
    mask: Mask | None
    axis_name: AxisName | None
    record: Literal[True, "leaves"]
    name: str
