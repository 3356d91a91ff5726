"""Types of optclip's arguments and states, for the annotations of user code.

==================== ===============================================================
name                 meaning
==================== ===============================================================
`PyTree`             any pytree
`Mask`               a tree of bools, a prefix of one, or a function of the updates
`Threshold`          a number, a schedule or a `Rule`, which receives a `Seen`
`ScopeLike`          elements that share a norm: `"tree"`, `"leaf"`, `"element"` or a
                     `Scope`
`NormLike`           a norm: its name, its order p or a `Norm`
`ResponseLike`       a response: its name, a `Response` or a function
`History`            the output of `optclip.metrics` over the steps
`Explanation`        the result of `explain`; `Suggestion` of `suggest`
`ClipState`          the state of a transformation, with its `ClipRecord`
`CotangentRecord`    the record of `clip_cotangent` in a backward pass
`SkipState`          the state of `skip`, with its `SkipRecord`; other wrappers have
                     `HistoryState`, `PeriodicResetState`, `ClipAfterState`,
                     `ConstrainState`
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

from ._arrays._types import History, Mask, PyTree
from ._explain._explanation import Explanation
from ._monitor._suggest import Suggestion
from ._norms._norm import NormLike
from ._responses._response_argument import ResponseLike
from ._scopes._scope import ScopeLike
from ._thresholds._rule import Threshold
from ._typing._states import (
    ClipAfterState,
    ClipRecord,
    ClipState,
    ConstrainState,
    CotangentRecord,
    HistoryState,
    PeriodicResetState,
    SkipRecord,
    SkipState,
)

__all__ = [
    "ClipAfterState",
    "ClipRecord",
    "ClipState",
    "ConstrainState",
    "CotangentRecord",
    "Explanation",
    "History",
    "HistoryState",
    "Mask",
    "NormLike",
    "PeriodicResetState",
    "PyTree",
    "ResponseLike",
    "ScopeLike",
    "SkipRecord",
    "SkipState",
    "Suggestion",
    "Threshold",
]
