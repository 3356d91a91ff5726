"""States of optclip's transformations, and records of clipping."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import jax

from .._arrays._types import PyTree


class ClipRecord(NamedTuple):
    """Record the last step of a transformation and the number of clipped steps.

    For the tree each field is a scalar, for groups a dict of scalars by label. For
    leaves, axes and elements it is one scalar for all norms or, with `record="leaves"`,
    a dict of scalars by the path of the leaf. For `optclip.layers` the entry of a stack
    is `{"layers": array}`, with one number per layer. An entry for several norms has
    derivative 0.

    Attributes:
      clip_norm: float32, the norm before clipping; of several, the one with the largest
        ratio to its threshold. Under a rule it is at least 1e-6 of the largest norm.
      clip_threshold: float32, the threshold of this norm.
      clip_coefficient: float32, the factor applied to the updates with this norm.
      clip_fraction: float32, the fraction of norms clipped in the last step; None for
        the tree and groups.
      clip_clipped: int32, the number of steps with clipping; norms that `nonfinite`
        zeroed or made NaN do not count.
      clip_nonfinite: int32, the number of steps with a norm that is NaN, inf or above
        the largest float.
      clip_leaf_norm: A dict of float32 with the norm of each leaf by its path, for
        global-norm clipping with `record="leaves"`; otherwise None.
    """

    clip_norm: PyTree
    clip_threshold: PyTree
    clip_coefficient: PyTree
    clip_fraction: PyTree
    clip_clipped: PyTree
    clip_nonfinite: PyTree
    clip_leaf_norm: PyTree = None


class SkipRecord(NamedTuple):
    """Count the steps that `skip` skipped.

    Attributes:
      skip_skipped: int32, the number of steps skipped so far.
      skip_consecutive: int32, the number of steps skipped in a row, up to the last
        step.
      skip_loss: float32, the last loss if `max_loss` is set; otherwise None.
      skip_loss_threshold: float32, the threshold of `skip_loss`; None without it.
    """

    skip_skipped: jax.Array
    skip_consecutive: jax.Array
    skip_loss: PyTree = None
    skip_loss_threshold: PyTree = None


class CotangentRecord(NamedTuple):
    """Record the cotangents that `clip_cotangent` clipped in a backward pass.

    All fields are float32, since a cotangent must be floating-point. Counts are exact
    up to 16,777,216.

    Attributes:
      cotangent_norm: The largest finite norm before clipping.
      cotangent_norms: The number of norms; 0 if no backward pass used the probe.
      cotangent_clipped: The number of norms clipped. Norms of 0, and norms that
        `nonfinite` zeroed or made NaN, do not count.
      cotangent_nonfinite: The number of non-finite norms.
      cotangent_coefficients: The sum of the coefficients, 1 for norms that are 0 or
        non-finite.
      cotangent_chains: 1, or more if one probe was passed to several calls in parallel;
        the largest norm is then unknown.
    """

    cotangent_norm: PyTree
    cotangent_norms: PyTree
    cotangent_clipped: PyTree
    cotangent_nonfinite: PyTree
    cotangent_coefficients: PyTree
    cotangent_chains: PyTree


def is_cotangent_record(value: object) -> TypeGuard[CotangentRecord]:
    """Return whether a value in a tree is the record of `clip_cotangent`."""
    return isinstance(value, CotangentRecord)


class ClipState(NamedTuple):
    """Store the state of an optclip transformation.

    Attributes:
      clip_step: int32, the number of updates so far.
      clip_memory: The memory of the threshold's rules, under the norm and scope that
        they learned, such as `"Norm 2 0 of EachLeaf"`; without arrays for numbers and
        schedules. Over leaves or groups it has one array per quantity, `(norms,)` or
        `(norms, window)`, under a key with a digest of the norms' paths; over slices
        one array per leaf, by position; over elements also trees like the parameters,
        sharded like them.
      clip_record: A dict from the name of the transformation to its `ClipRecord`; empty
        with `record=False`.
    """

    clip_step: jax.Array
    clip_memory: PyTree
    clip_record: dict[str, ClipRecord]


class SkipState(NamedTuple):
    """Store the state of `skip`.

    Attributes:
      skip_inner: The state of the wrapped optimizer, unchanged by a skipped step.
      skip_norm: The state of the norm's threshold.
      skip_loss: The memory of the rule of `max_loss`; empty without one.
      skip_record: A dict from the name to its `SkipRecord`.
      skip_finite: int32, the number of finite steps skipped since the last applied one,
        which `max_consecutive` limits.
    """

    skip_inner: PyTree
    skip_norm: ClipState
    skip_loss: PyTree
    skip_record: dict[str, SkipRecord]
    skip_finite: jax.Array


class HistoryState(NamedTuple):
    """Store the state of `with_history`.

    Attributes:
      history_inner: The state of the wrapped optimizer.
      history_rows: The recorded steps, a dict of one entry. Its key is the number of
        quantities and a digest of their names. The entry is float32 `(steps,
        quantities)`; update `i` is in row `i % steps`, and rows start as zeros.
      history_count: int32, the number of updates so far.
      history_names: uint8, the names of the quantities as JSON, since their order
        cannot be derived from a restored state.
    """

    history_inner: PyTree
    history_rows: dict[str, jax.Array]
    history_count: jax.Array
    history_names: jax.Array


class ErrorFeedbackState(NamedTuple):
    """Store the state of `recipes.uclip`.

    Attributes:
      feedback_residual: The part removed and not applied yet: like the parameters, in
        float32 or wider; None for leaves that are never clipped.
      feedback_clip: The state of the clipping transformation.
    """

    feedback_residual: PyTree
    feedback_clip: PyTree


class PeriodicResetState(NamedTuple):
    """Store the state of `with_periodic_reset`.

    Attributes:
      reset_step: int32, the number of updates so far.
      reset_inner: The state of the wrapped optimizer.
    """

    reset_step: jax.Array
    reset_inner: PyTree


class ClipAfterState(NamedTuple):
    """Store the states of `clip_after`.

    Attributes:
      after_inner: The state of the wrapped optimizer.
      after_clip: The state of the clipping transformation that follows it.
    """

    after_inner: PyTree
    after_clip: PyTree


class ConstrainState(NamedTuple):
    """Store the states of `constrain`.

    Attributes:
      constrain_inner: The state of the wrapped optimizer.
      constrain_clip: The state of the transformation that clips the parameters.
    """

    constrain_inner: PyTree
    constrain_clip: PyTree
