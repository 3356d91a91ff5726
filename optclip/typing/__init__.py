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
                     `eps`; `SkipOptions` of `skip`; `CotangentOptions` of
                     `clip_cotangent`
`PyTree`             any pytree
`ClipState`          the state of a transformation, with its `ClipRecord`
`CotangentRecord`    the record of `clip_cotangent` in a backward pass
`SkipState`          the state of `skip`, with its `SkipRecord`; other wrappers have
                     `ErrorFeedbackState`, `PeriodicResetState`, `ClipAfterState`
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

from optclip import responses, thresholds
from optclip._arrays import _types
from optclip.norms import Norm as Norm
from optclip.norms import _interface as _norm_interface
from optclip.responses import Response as Response
from optclip.scopes import Scope as Scope
from optclip.scopes import _interface as _scope_interface
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
"""Any JAX pytree, such as dicts, lists, tuples, modules or a single leaf."""

Number = _types.Number
"""A real number of Python or NumPy, or an array, traced or not; not a bool."""

NumberOrSchedule = _types.NumberOrSchedule
"""A number, or an optax schedule (a function of the step)."""

Threshold = thresholds.Threshold
"""A threshold, which is a number, an optax schedule or a `Rule`."""

ThresholdTree = thresholds.ThresholdTree
"""A threshold, or a prefix tree of thresholds with None for unclipped."""

Nonfinite = _types.Nonfinite
"""The policy `"propagate"`, `"zero"` or `"raise"` for NaN and inf."""

Record = _types.Record
"""True, False or `"leaves"`, which also records the norm of each leaf."""

Relative = _types.Relative
"""The unit of a cotangent threshold, computed from all norms of a leaf."""

NormLike = _norm_interface.NormLike
"""A norm's name, its order p, or a `Norm`."""

ScopeLike = _scope_interface.ScopeLike
"""The scope of a norm, which is `"tree"`, `"leaf"`, `"element"` or a `Scope`."""

ResponseLike = responses.ResponseLike
"""A response's name, a `Response`, or a function of norm and threshold."""

Mask = _types.Mask
"""A tree of bools, a prefix of one, or a function of the updates."""

Labels = _types.Labels
"""A tree of strings, a prefix of one, or a function of the updates."""

AxisName = _types.AxisName
"""A mesh axis, a tuple of them, a `PartitionSpec`, a tree of these, or a function."""

History = _types.History
"""The output of `optclip.metrics` as a list of dicts, a dict of arrays, or a file."""

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
