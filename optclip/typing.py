"""The types of optclip's arguments, for the annotations of your own code.

They say to a reader, an editor and a type checker what an argument takes; what it does
with it is in the docstrings of the functions.

Example:
  >>> import optax, optclip
  >>> from optclip.typing import ResponseLike, Threshold
  >>> def make(threshold: Threshold, response: ResponseLike = "hard"):
  ...     clip = optclip.clip_by_global_norm(threshold, response=response)
  ...     return optax.chain(clip, optax.adam(1e-3))
  >>> print(type(make(optclip.thresholds.quantile(0.9))).__name__)
  GradientTransformationExtraArgs
"""

from collections.abc import Callable
from typing import Any, TypedDict

from optclip import _types, norms, responses, scopes, thresholds

PyTree = _types.PyTree
"""What JAX takes for a tree, such as dicts, lists, tuples, modules or a single leaf."""

Number = _types.Number
"""A real number, Python's or NumPy's, or an array of them, traced or not; no bool."""

NumberOrSchedule = _types.NumberOrSchedule
"""A number, or an optax schedule, which is a function of the step."""

Threshold = thresholds.Threshold
"""One threshold, be it a number, an optax schedule or a `Rule`."""

ThresholdTree = thresholds.ThresholdTree
"""A threshold, or a prefix tree of thresholds with None for what is not clipped."""

ResponseLike = responses.ResponseLike
"""A response's name, a `Response`, or a function of norm and threshold."""

Mask = _types.Mask
"""A tree of bools, a prefix of one, or a function that makes one of the updates."""

Labels = _types.Labels
"""A tree of strings, a prefix of one, or a function that makes one of the updates."""

AxisName = _types.AxisName
"""A mesh axis, a tuple of them, a `PartitionSpec`, a tree of these, or a function."""

History = _types.History
"""What `optclip.metrics` returned, as a list of dicts, a dict of arrays, or a file."""


class MomentClipOptions(TypedDict, total=False):
    """`ClipOptions` of a recipe that has moments: `eps` is theirs."""

    over: scopes.Scope
    norm: norms.Norm
    response: ResponseLike
    of: Callable[[PyTree, PyTree, dict[str, Any]], PyTree] | None
    strict: bool
    nonfinite: str
    norm_mask: Mask | None
    clip_mask: Mask | None
    axis_name: AxisName | None
    record: bool | str
    name: str


class ClipOptions(MomentClipOptions, total=False):
    """The further arguments of `clip_by`, as a recipe passes them on.

    A recipe fixes some of them, and says TypeError where one is given twice.
    """

    eps: Number


class SkipOptions(TypedDict, total=False):
    """The further arguments of `skip`, as a recipe passes them on."""

    value_when: Threshold | None
    over: scopes.Scope
    norm: norms.Norm
    max_consecutive: int | None
    learn_skipped: bool
    norm_mask: Mask | None
    axis_name: AxisName | None
    name: str


__all__ = [
    "AxisName",
    "ClipOptions",
    "History",
    "Labels",
    "Mask",
    "MomentClipOptions",
    "Number",
    "NumberOrSchedule",
    "PyTree",
    "ResponseLike",
    "SkipOptions",
    "Threshold",
    "ThresholdTree",
]
