"""Clip each leaf by its own norm, as optax transformations."""

from __future__ import annotations

import optax

from .. import _scopes as scopes
from .._norms import of_order
from .._thresholds import Named
from .._typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    ThresholdTree,
)
from ._clip_by_transform import clip_by
from ._positions import checks_positions


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
    """Clip each leaf by its own norm.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(1.0)
      >>> updates = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'b': Array([0.5], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}

    Args:
      max_norm: Threshold: a number, optax schedule, `optclip.thresholds` rule, or
        prefix tree of these with None for unclipped.
      axis: Axes that a norm covers. Default: all, one norm per leaf.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      record: Whether to record each step; `"leaves"` records every metric per leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.

    References:
      `tf.clip_by_norm`; `clipnorm` of Keras.
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
    """Clip each leaf by its average norm.

    The average norm is the L2 norm divided by the number of elements, as TensorFlow
    defines it. Each leaf is multiplied by `min(1, max_norm / average_norm)`.
    `clip_by_rms` uses the root mean square.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_average_norm(0.5)
      >>> updates = jnp.array([3.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [0.6 0.8]

    Args:
      max_norm: Threshold: a number, optax schedule, `optclip.thresholds` rule, or
        prefix tree of these with None for unclipped.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      record: Whether to record each step; `"leaves"` records every metric per leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.

    References:
      `tf.compat.v1.clip_by_average_norm`.
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
    """Clip each leaf by its root mean square.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_rms / rms)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_rms(1.0)
      >>> updates = jnp.array([3.0, -3.0, 3.0, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [ 1. -1.  1.  1.]

    Args:
      max_rms: Threshold: a number, optax schedule, `optclip.thresholds` rule, or prefix
        tree of these with None for unclipped.
      axis: Axes that a mean covers. Default: all, one per leaf.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      record: Whether to record each step; `"leaves"` records every metric per leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.

    References:
      Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
      Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    return clip_by(
        Named("max_rms", max_rms, "clip_by_rms"), norm="rms",
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip
