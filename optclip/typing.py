"""Types of optclip's arguments and states, for the annotations of user code.

==================== ===============================================================
name                 meaning
==================== ===============================================================
`Number`             a real number or an array; `NumberOrSchedule` also an optax
                     schedule
`Threshold`          a number, a schedule or a `Rule`, which receives a `Seen`
`ThresholdTree`      a threshold, or a prefix tree of them with None for unclipped
`ScopeLike`          elements that share a norm: `"tree"`, `"leaf"`, `"element"` or a
                     `Scope`
`NormLike`           a norm: its name, its order p or a `Norm`
`ResponseLike`       a response: its name, a `Response` or a function
`Relative`           the unit of the threshold of `clip_cotangent`
`Nonfinite`          the policy for NaN and inf
`Record`             whether to record each step: True, False or `"leaves"`
`Mask`, `Labels`     a tree of bools or strings, or a function of the updates
`AxisName`           a mesh axis, several, a `PartitionSpec`, or a tree of these
`History`            the output of `optclip.metrics` over the steps
`ClipOptions`        options that recipes pass to `clip_by`; `MomentClipOptions` lacks
                     `eps`; `SkipOptions` of `skip`
`Explanation`        the result of `explain`; `Suggestion` of `suggest`
`PyTree`             any pytree
`ClipState`          the state of a transformation, with its `ClipRecord`
`CotangentRecord`    the record of `clip_cotangent` in a backward pass
`SkipState`          the state of `skip`, with its `SkipRecord`; other wrappers have
                     `HistoryState`, `ErrorFeedbackState`, `PeriodicResetState`,
                     `ClipAfterState`, `ConstrainState`
==================== ===============================================================

Type checkers do not check the contents of pytrees.

Example:
  >>> import optax, optclip
  >>> from optclip.typing import ResponseLike, Threshold
  >>> def make(threshold: Threshold, response: ResponseLike = "hard"):
  ...     clip = optclip.clip_by_global_norm(threshold, response=response)
  ...     return optax.chain(clip, optax.adam(1e-3))
  >>> print(type(make(optclip.thresholds.quantile(0.9))).__name__)
  GradientTransformationExtraArgs
"""

from ._arrays._types import (
    AxisName,
    History,
    Labels,
    Mask,
    Nonfinite,
    Number,
    NumberOrSchedule,
    PyTree,
    Record,
    Relative,
)
from ._explain._explanation import Explanation
from ._monitor._suggest import Suggestion
from ._norms._norm import NormLike
from ._responses._response_argument import ResponseLike
from ._scopes._scope import ScopeLike
from ._thresholds._rule import Threshold, ThresholdTree
from ._typing._options import ClipOptions, MomentClipOptions, SkipOptions
from ._typing._states import (
    ClipAfterState,
    ClipRecord,
    ClipState,
    ConstrainState,
    CotangentRecord,
    ErrorFeedbackState,
    HistoryState,
    PeriodicResetState,
    SkipRecord,
    SkipState,
)

__all__ = [
    "AxisName",
    "ClipAfterState",
    "ClipOptions",
    "ClipRecord",
    "ClipState",
    "ConstrainState",
    "CotangentRecord",
    "ErrorFeedbackState",
    "Explanation",
    "History",
    "HistoryState",
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
    "Suggestion",
    "Threshold",
    "ThresholdTree",
]
