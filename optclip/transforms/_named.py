"""The named clips as optax transformations, each one call of the engine.

Beside its own arguments each takes those of `clip_by`, described there: `response`,
`eps`, `strict`, `nonfinite`, `norm_mask`, `clip_mask`, `axis_name`, `record`, `name`.
A threshold is a number, an array, a traced value, an optax schedule or a rule; for
leaf and group scope also a prefix tree of these, with None for unclipped.
"""

from __future__ import annotations

import optax

from optclip import norms, scopes
from optclip.norms._norm import of_order
from optclip.thresholds import bounds
from optclip.thresholds._resolve import Named
from optclip.transforms._clip_by import clip_by
from optclip.typing import (
    AxisName,
    Labels,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    Threshold,
    ThresholdTree,
)


def clip_by_value(
    limit: ThresholdTree | None = None,
    *,
    lower: ThresholdTree | None = None,
    upper: ThresholdTree | None = None,
    response: ResponseLike = "hard",
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each element to :math:`[-limit, limit]`, or to :math:`[lower, upper]`.

    Args:
      limit: the symmetric bound, Keras' `clipvalue`; at least 0. Complex elements are
        clipped by their modulus. Give this, or `lower` and `upper`.
      lower: the lower bound, of any sign; None is none.
      upper: the upper bound, of any sign; None is none.
      response, strict, nonfinite, clip_mask, record, name: as in `clip_by`.

    Returns:
      A transformation. Elements inside the bounds are kept to the bit.

    Raises:
      TypeError: both forms are given, or neither; a bound is not a number.
      ValueError: a concrete bound is NaN, `limit` is negative, or `lower > upper`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0)
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  1. ]

    Source: `tf.clip_by_value`; Keras' `clipvalue`; `optax.clip`.
    """
    two = lower is not None or upper is not None
    if two == (limit is not None):
        raise TypeError(
            "Either `limit` or `lower` and `upper` must be given, got"
            f" {'both' if two else 'neither'}: limit={limit!r}, lower={lower!r},"
            f" upper={upper!r}. Give limit alone for symmetric bounds, or lower= and"
            " upper= (either may be left out)."
        )
    threshold = bounds(lower, upper) if two else Named("limit", limit)
    return clip_by(
        threshold, over=scopes.ELEMENT, response=response, strict=strict,
        nonfinite=nonfinite, clip_mask=clip_mask, record=record, name=name,
    )  # fmt: skip


def clip_by_norm(
    max_norm: ThresholdTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its own norm, :math:`x \min(1, c / \|x\|)`.

    Args:
      max_norm: c; Keras' `clipnorm`.
      axis: the axes that each norm is taken over; None is all.
      ord: p of the norm, any number above 0 or inf; None is 2.
      response, eps, strict, nonfinite, clip_mask, axis_name, record, name: as in
        `clip_by`.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, a
        leaf lacks `axis` or a tree of thresholds does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(1.0)
      >>> updates = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'b': Array([0.5], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}

    Source: `tf.clip_by_norm`; Keras' `clipnorm`.
    """
    return clip_by(
        Named("max_norm", max_norm), norm=of_order(ord),
        over=scopes.LEAF if axis is None else scopes.axes(axis), response=response,
        eps=eps, strict=strict, nonfinite=nonfinite, norm_mask=clip_mask,
        clip_mask=clip_mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


def clip_by_average_norm(
    max_norm: ThresholdTree,
    *,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its average norm, :math:`x \min(1, c\,n / \|x\|_2)`.

    The average norm is the L2 norm over the number n of elements, as TensorFlow
    defined it; for the root mean square see `clip_by_rms`.

    Args:
      max_norm: c.
      response, eps, strict, nonfinite, clip_mask, axis_name, record, name: as in
        `clip_by`.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_average_norm(0.5)
      >>> updates = jnp.array([3.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [0.6 0.8]

    Source: `tf.compat.v1.clip_by_average_norm`.
    """
    return clip_by(
        Named("max_norm", max_norm), over=scopes.LEAF,
        norm=norms.AVERAGE, response=response, eps=eps, strict=strict,
        nonfinite=nonfinite, norm_mask=clip_mask, clip_mask=clip_mask,
        axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


def clip_by_rms(
    max_rms: ThresholdTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf by its root mean square, :math:`x \min(1, c / RMS(x))`.

    Args:
      max_rms: c.
      axis: the axes that each mean is taken over; None is all.
      response, eps, strict, nonfinite, clip_mask, axis_name, record, name: as in
        `clip_by`.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_rms` is negative or NaN; at `init` and `update`, a
        leaf lacks `axis`.

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
        Named("max_rms", max_rms), norm=norms.RMS,
        over=scopes.LEAF if axis is None else scopes.axes(axis), response=response,
        eps=eps, strict=strict, nonfinite=nonfinite, norm_mask=clip_mask,
        clip_mask=clip_mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


def clip_by_group_norm(
    max_norm: ThresholdTree,
    groups: Labels,
    *,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each group of leaves by the norm of the group.

    Args:
      max_norm: one threshold for all groups, or a dict by label; None is unclipped.
      groups: a tree of strings with the structure of the updates or a prefix of it, or
        a function from the updates to one (see `by_path`); None marks leaves in no
        group, which are left alone.
      ord: p of the norm, any number above 0 or inf; None is 2.
      response, eps, strict, nonfinite, norm_mask, clip_mask, axis_name, record, name:
        as in `clip_by`.

    Returns:
      A transformation; `metrics` gives its norms by label.

    Raises:
      TypeError: a label is not a string.
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, the
        labels or thresholds do not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_group_norm(
      ...     {"body": 1.0, "head": None},
      ...     optclip.by_path(lambda path: "head" if "head" in path else "body"),
      ... )
      >>> updates = {"w": jnp.array([3.0, 4.0]), "head": jnp.array([9.0])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'head': Array([9.], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}
    """
    return clip_by(
        Named("max_norm", max_norm), over=scopes.groups(groups),
        norm=of_order(ord), response=response, eps=eps, strict=strict,
        nonfinite=nonfinite, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


def clip_by_global_norm(
    max_norm: Threshold,
    *,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip all leaves by their common norm, :math:`x \min(1, c / \|updates\|)`.

    A drop-in for `optax.clip_by_global_norm`.

    Args:
      max_norm: c; Keras' `global_clipnorm`.
      ord: p of the norm, any number above 0 or inf; None is 2.
      response, eps, strict, nonfinite, norm_mask, clip_mask, axis_name, record, name:
        as in `clip_by`.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN.

    Guarantees:
      Those of `functional.clip_by_global_norm`, edge by edge.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> print(updates["w"], optclip.metrics(state)["clip/norm"])
      [-0.6 -0.8] 5.0

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent
    Neural Networks", 2012, arXiv:1211.5063.
    """
    return clip_by(
        Named("max_norm", max_norm), over=scopes.TREE,
        norm=of_order(ord), response=response, eps=eps, strict=strict,
        nonfinite=nonfinite, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name, record=record, name=name,
    )  # fmt: skip
