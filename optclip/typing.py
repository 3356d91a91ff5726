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

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

import jax

from optclip import responses, thresholds
from optclip._arrays import _types
from optclip.norms import Norm as Norm
from optclip.norms._spectral import NormLike as NormLike
from optclip.responses import Response as Response
from optclip.scopes import Scope as Scope
from optclip.scopes._scope import ScopeLike as ScopeLike
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

Relative = Literal["rms", "median"] | float | Callable[[jax.Array], Any]
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


class ClipRecord(NamedTuple):
    """What a clip did in its last step, and how often it did something.

    For the tree each field is a scalar, for groups a dict of scalars by label. For
    leaves, axes and elements it is a scalar over all blocks or, with
    `record="leaves"`, a dict of scalars by the path of the leaf.

    Attributes:
      clip_norm: float32, the norm before the clip; the largest, of several.
      clip_threshold: float32; the smallest, of several.
      clip_coefficient: float32, what the updates were multiplied by; the smallest.
      clip_fraction: float32, the fraction of norms past their threshold in the last
        step; None for the tree and groups.
      clip_clipped: int32, the number of steps in which anything was clipped; what
        was zeroed or made NaN for a non-finite norm does not count as clipped.
      clip_nonfinite: int32, the number of steps with a norm that was not finite: of a
        NaN or inf entry, or above the largest float.
      clip_leaf_norm: of a clip of the whole tree with `record="leaves"`, a dict of the
        norm of each leaf by its path, float32; else None.
    """

    clip_norm: PyTree
    clip_threshold: PyTree
    clip_coefficient: PyTree
    clip_fraction: PyTree
    clip_clipped: PyTree
    clip_nonfinite: PyTree
    clip_leaf_norm: PyTree = None


class SkipRecord(NamedTuple):
    """How often `skip` left out a step.

    Attributes:
      skip_skipped: int32, the number of steps skipped so far.
      skip_consecutive: int32, how many of them were the last ones without a break.
      skip_value: float32, the last `value`, if `max_value` looks at it; else None.
      skip_value_threshold: float32, what it was compared with; None without `value`.
    """

    skip_skipped: jax.Array
    skip_consecutive: jax.Array
    skip_value: PyTree = None
    skip_value_threshold: PyTree = None


class CotangentRecord(NamedTuple):
    """What `clip_cotangent` did in a backward pass; all float32, so that it has one.

    Counts are whole numbers, up to 16,777,216 to the last.

    Attributes:
      cotangent_norm: the largest finite norm before the clip.
      cotangent_norms: how many norms there were; 0 if no backward pass came by.
      cotangent_clipped: how many of them were clipped; what was zeroed or made NaN for
        a non-finite norm does not count as clipped, nor does a norm of 0.
      cotangent_nonfinite: how many of them had an entry that was not finite, or were
        not finite themselves.
      cotangent_coefficients: the sum of what was multiplied by, 1 for each norm that is
        0 or not finite.
      cotangent_chains: 1, or more where one probe went to several clips and not from
        one to the next; the largest norm is then not known.
    """

    cotangent_norm: PyTree
    cotangent_norms: PyTree
    cotangent_clipped: PyTree
    cotangent_nonfinite: PyTree
    cotangent_coefficients: PyTree
    cotangent_chains: PyTree


class ClipState(NamedTuple):
    """The state of every optclip transformation.

    Attributes:
      clip_step: int32, the number of updates so far.
      clip_memory: what the threshold's rules remember; empty for numbers, schedules. A
        tree of one entry a norm is kept as a dict by path; of one entry an element it
        stays, and is sharded as the parameters are.
      clip_record: a dict from the name of the clip to its `ClipRecord`; empty with
        `record=False`.
    """

    clip_step: jax.Array
    clip_memory: PyTree
    clip_record: dict[str, ClipRecord]


class SkipState(NamedTuple):
    """The state of `skip`.

    Attributes:
      skip_inner: the state of the optimizer, as it was if the last step was skipped.
      skip_norm: what watches the norm.
      skip_value: the memory of the rule that watches `value`; empty without one.
      skip_record: a dict from the name to a `SkipRecord`.
    """

    skip_inner: PyTree
    skip_norm: ClipState
    skip_value: PyTree
    skip_record: dict[str, SkipRecord]


class ErrorFeedbackState(NamedTuple):
    """The state of `with_error_feedback`.

    Attributes:
      feedback_residual: the residual, what was cut off so far, like the parameters, in
        float32 or wider; None for leaves that no clip touches.
      feedback_clip: the state of the clip.
    """

    feedback_residual: PyTree
    feedback_clip: PyTree


class PeriodicResetState(NamedTuple):
    """The state of `with_periodic_reset`.

    Attributes:
      reset_step: int32, the number of updates so far.
      reset_inner: the state of the optimizer.
    """

    reset_step: jax.Array
    reset_inner: PyTree


class ClipAfterState(NamedTuple):
    """The states of the two.

    Attributes:
      after_inner: the state of the optimizer.
      after_clip: the state of the clip behind it.
    """

    after_inner: PyTree
    after_clip: PyTree


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
