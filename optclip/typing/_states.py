"""The states of optclip's transformations, and the records of what was clipped."""

from typing import NamedTuple

import jax

from optclip._arrays._types import PyTree


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
      clip_memory: the memory of the threshold's rules; empty for numbers, schedules.
        A rule over whole leaves or groups has one array per quantity, `(norms,)` or
        `(norms, window)`, under a key with a digest of the paths of the norms. A rule
        over slices has one array per leaf, by position. A rule over elements has trees
        like the parameters, which are sharded as they are.
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
