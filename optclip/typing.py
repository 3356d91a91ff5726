"""The types of optclip's arguments, for the annotations of your own code.

==================== ===============================================================
name                 what it stands for
==================== ===============================================================
`Number`             a real number, or an array of them; `NumberOrSchedule`, or an
                     optax schedule of it
`Threshold`          one: a number, a schedule or a `Rule`, which is shown a `Seen`
`ThresholdTree`      one, or a prefix tree of them, None for what is not clipped
`ResponseLike`       the name of a response, a `Response`, or a function
`Nonfinite`          what to do about NaN and inf, in a word
`Record`             whether to keep what happened: True, False or `"leaves"`
`Mask`, `Labels`     a tree of bools or strings, or a function of the updates
`AxisName`           a mesh axis, several, a `PartitionSpec`, or a tree of these
`History`            what `optclip.metrics` returned, over the steps
`ClipOptions`        the further arguments of `clip_by` and of the recipes; likewise
                     `MomentClipOptions`, without `eps`, and `SkipOptions`
`PyTree`             any tree
==================== ===============================================================

What is in a tree no type checker looks at. What an argument does is in the docstrings
of the functions.

Example:
  >>> import optax, optclip
  >>> from optclip.typing import ResponseLike, Threshold
  >>> def make(threshold: Threshold, response: ResponseLike = "hard"):
  ...     clip = optclip.clip_by_global_norm(threshold, response=response)
  ...     return optax.chain(clip, optax.adam(1e-3))
  >>> print(type(make(optclip.thresholds.quantile(0.9))).__name__)
  GradientTransformationExtraArgs
"""

from typing import TypedDict

from optclip import norms, responses, scopes, thresholds
from optclip._arrays import _types
from optclip.norms import Norm as Norm
from optclip.responses import Response as Response
from optclip.scopes import Scope as Scope
from optclip.thresholds import Rule as Rule
from optclip.thresholds import Seen as Seen

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

Nonfinite = _types.Nonfinite
"""What a clip does about NaN and inf, in a word; see `optclip.functional`."""

Record = _types.Record
"""Whether the state keeps what happened, True, False or by leaf."""

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
    strict: bool
    nonfinite: Nonfinite
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
    "Nonfinite",
    "Number",
    "NumberOrSchedule",
    "PyTree",
    "Record",
    "ResponseLike",
    "SkipOptions",
    "Threshold",
    "ThresholdTree",
]
