"""The types of optclip's arguments and states, for annotations of your own code.

==================== ===============================================================
name                 what it stands for
==================== ===============================================================
`Number`             a real number, or an array of them; `NumberOrSchedule`, or an
                     optax schedule of it
`Threshold`          one: a number, a schedule or a `Rule`, which is shown a `Seen`
`ThresholdTree`      one, or a prefix tree of them, None for what is not clipped
`ScopeLike`          what shares a norm: `"tree"`, `"leaf"`, `"element"` or a `Scope`
`NormLike`           which norm: its name, its order p or a `Norm`
`ResponseLike`       the name of a response, a `Response`, or a function
`Relative`           what the threshold of `clip_cotangent` is a multiple of
`Nonfinite`          what to do about NaN and inf, in a word
`Record`             whether to keep what happened: True, False or `"leaves"`
`Mask`, `Labels`     a tree of bools or strings, or a function of the updates
`AxisName`           a mesh axis, several, a `PartitionSpec`, or a tree of these
`History`            what `optclip.metrics` returned, over the steps
`ClipOptions`        the further arguments of `clip_by` and of the recipes;
                     `MomentClipOptions` those without `eps`, `SkipOptions` of `skip`,
                     `CotangentOptions` of `clip_cotangent`
`PyTree`             any tree
`ClipState`          the state of a clip, with its `ClipRecord`
`CotangentRecord`    what `clip_cotangent` did in a backward pass
`SkipState`          that of `skip`, with its `SkipRecord`; `ErrorFeedbackState`,
                     `PeriodicResetState`, `ClipAfterState` are those of the others
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

from optclip import responses, thresholds
from optclip._arrays import _types
from optclip.norms import Norm as Norm
from optclip.norms._interface import NormLike as NormLike
from optclip.responses import Response as Response
from optclip.scopes import Scope as Scope
from optclip.scopes._interface import ScopeLike as ScopeLike
from optclip.thresholds import Rule as Rule
from optclip.thresholds import Seen as Seen
from optclip.typing._options import ClipOptions as ClipOptions
from optclip.typing._options import CotangentOptions as CotangentOptions
from optclip.typing._options import MomentClipOptions as MomentClipOptions
from optclip.typing._options import SkipOptions as SkipOptions
from optclip.typing._states import ClipAfterState as ClipAfterState
from optclip.typing._states import ClipRecord as ClipRecord
from optclip.typing._states import ClipState as ClipState
from optclip.typing._states import CotangentRecord as CotangentRecord
from optclip.typing._states import ErrorFeedbackState as ErrorFeedbackState
from optclip.typing._states import PeriodicResetState as PeriodicResetState
from optclip.typing._states import SkipRecord as SkipRecord
from optclip.typing._states import SkipState as SkipState

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

Relative = _types.Relative
"""What a threshold of cotangents is a multiple of, made of all norms of a leaf."""

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

__all__ = [
    "AxisName",
    "ClipAfterState",
    "ClipOptions",
    "ClipRecord",
    "ClipState",
    "CotangentOptions",
    "CotangentRecord",
    "ErrorFeedbackState",
    "History",
    "Labels",
    "Mask",
    "MomentClipOptions",
    "Nonfinite",
    "NormLike",
    "Number",
    "NumberOrSchedule",
    "PeriodicResetState",
    "PyTree",
    "Record",
    "Relative",
    "ResponseLike",
    "ScopeLike",
    "SkipOptions",
    "SkipRecord",
    "SkipState",
    "Threshold",
    "ThresholdTree",
]
