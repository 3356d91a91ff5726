"""The further arguments of a function, as another function passes them on."""

from typing import TypedDict

from optclip._arrays._types import AxisName, Mask, Nonfinite, Number, Record, Relative
from optclip.norms._interface import NormLike
from optclip.responses import ResponseLike
from optclip.scopes._interface import ScopeLike
from optclip.thresholds import Threshold


class MomentClipOptions(TypedDict, total=False):
    """`ClipOptions` of a recipe that has moments: `eps` is theirs."""

    over: ScopeLike
    norm: NormLike
    response: ResponseLike
    strict: bool
    nonfinite: Nonfinite
    mask: Mask | None
    norm_mask: Mask | None
    clip_mask: Mask | None
    axis_name: AxisName | None
    record: Record
    name: str


class ClipOptions(MomentClipOptions, total=False):
    """The further arguments of `clip_by`, as a recipe passes them on.

    A recipe fixes some of them, and says TypeError where one is given twice.
    """

    eps: Number


class SkipOptions(TypedDict, total=False):
    """The further arguments of `skip`, as a recipe passes them on."""

    max_value: Threshold | None
    over: ScopeLike
    norm: NormLike
    max_consecutive: int | None
    learn_skipped: bool
    mask: Mask | None
    axis_name: AxisName | None
    name: str


class CotangentOptions(TypedDict, total=False):
    """The further arguments of `clip_cotangent`, as `with_clipped_cotangent` has them.

    `probe` is not among them: the outputs alone are returned.
    """

    axis: int | tuple[int, ...] | None
    ord: float | None
    response: ResponseLike
    relative: Relative | None
    nonfinite: Nonfinite
    mask: Mask | None
    axis_name: AxisName | None
    name: str | None
