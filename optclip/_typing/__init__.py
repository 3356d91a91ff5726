"""Types of arguments (`_aliases`), options (`_options`) and states (`_states`)."""

from ._aliases import (
    AxisName,
    History,
    Labels,
    Mask,
    Nonfinite,
    NormLike,
    Number,
    NumberOrSchedule,
    PyTree,
    Record,
    Relative,
    ResponseLike,
    ScopeLike,
    Threshold,
    ThresholdTree,
)
from ._options import ClipOptions, CotangentOptions, MomentClipOptions, SkipOptions
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
