"""Types of arguments, of options (`_options`), and of states (`_states`)."""

from .._arrays._types import (
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
from .._norms import NormLike
from .._responses import ResponseLike
from .._scopes import ScopeLike
from .._thresholds import Threshold, ThresholdTree
from ._options import ClipOptions, MomentClipOptions, SkipOptions
from ._states import (
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
    is_cotangent_record,
)
