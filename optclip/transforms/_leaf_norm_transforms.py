"""The clips of each leaf by its own norm, each one call of `clip_by`."""

from __future__ import annotations

import optax

from optclip import scopes
from optclip.norms._interface import of_order
from optclip.thresholds._interface import Named
from optclip.transforms._clip_by_transform import clip_by
from optclip.transforms._positions import checks_positions
from optclip.typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    ThresholdTree,
)


@checks_positions()
def clip_by_norm(
    max_norm: ThresholdTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its own norm, :math:`x \min(1, c / \|x\|)`.

    Args:
      max_norm: the largest norm that is let through, c in the formula: a number, an
        optax schedule, a rule of `optclip.thresholds`, or a prefix tree of these with
        None for what is not clipped. 0 clips to zero; inf measures and clips nothing.
        Keras calls it `clipnorm`.
      axis: the axes of each leaf that a norm is taken over, an int or a tuple; every
        leaf must have them. None is all of them: one norm a leaf.
      ord: the order p of the norm, any number above 0, or inf for the largest modulus;
        None is 2.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, a
        leaf lacks `axis`, or a tree of thresholds or a mask does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(1.0)
      >>> updates = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'b': Array([0.5], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}

    Source: `tf.clip_by_norm`; Keras' `clipnorm`.
    """
    return clip_by(
        Named("max_norm", max_norm, "clip_by_norm"), norm=of_order(ord),
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip


@checks_positions()
def clip_by_average_norm(
    max_norm: ThresholdTree,
    *,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its average norm, :math:`x \min(1, c\,n / \|x\|_2)`.

    The average norm is the L2 norm over the number n of elements, as TensorFlow
    defined it; for the root mean square see `clip_by_rms`.

    Args:
      max_norm: the largest norm that is let through, c in the formula: a number, an
        optax schedule, a rule of `optclip.thresholds`, or a prefix tree of these with
        None for what is not clipped. 0 clips to zero; inf measures and clips nothing.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, a
        tree of thresholds or a mask does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_average_norm(0.5)
      >>> updates = jnp.array([3.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [0.6 0.8]

    Source: `tf.compat.v1.clip_by_average_norm`.
    """
    return clip_by(
        Named("max_norm", max_norm, "clip_by_average_norm"), over="leaf",
        norm="average", response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip


@checks_positions()
def clip_by_rms(
    max_rms: ThresholdTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its root mean square, :math:`x \min(1, c / RMS(x))`.

    Args:
      max_rms: the largest root mean square that is let through, c in the formula: a
        number, an optax schedule, a rule of `optclip.thresholds`, or a prefix tree of
        these with None for what is not clipped. 0 clips to zero; inf measures and clips
        nothing.
      axis: the axes of each leaf that a mean is taken over, an int or a tuple; every
        leaf must have them. None is all of them: one a leaf.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_rms` is negative or NaN; at `init` and `update`, a
        leaf lacks `axis`, or a tree of thresholds or a mask does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_rms(1.0)
      >>> updates = jnp.array([3.0, -3.0, 3.0, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [ 1. -1.  1.  1.]

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    return clip_by(
        Named("max_rms", max_rms, "clip_by_rms"), norm="rms",
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip
