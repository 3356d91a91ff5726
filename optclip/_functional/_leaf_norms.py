"""Clip each leaf, or each slice of it, by its own norm."""

from __future__ import annotations

from .. import _scopes as scopes
from .._norms import of_order
from .._thresholds import Named
from .._typing import AxisName, Mask, Nonfinite, Number, PyTree, ResponseLike
from ._clip_by import clip_by


def clip_by_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its own norm.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_norm
      >>> print(clip_by_norm(jnp.array([[3.0, 0.1], [4.0, 0.2]]), 1.0, axis=0))
      [[0.6 0.1]
       [0.8 0.2]]

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number, array that broadcasts to the norms (shape of the
        leaf with 1 at `axis`), or prefix tree of these with None for unclipped.
      axis: Axes that a norm covers. Default: all, one norm per leaf.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves or slices within the threshold are bit-identical.

    References:
      `tf.clip_by_norm`.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), norm=of_order(ord),
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


def clip_by_average_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its average norm.

    The average norm is the L2 norm divided by the number of elements, as TensorFlow
    defines it. Each leaf is multiplied by `min(1, max_norm / average_norm)`.
    `clip_by_rms` uses the root mean square.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_average_norm
      >>> print(clip_by_average_norm(jnp.array([3.0, 4.0]), 0.5))
      [0.6 0.8]

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number, or a prefix tree of numbers with None for
        unclipped.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves within the threshold are bit-identical.

    References:
      `tf.compat.v1.clip_by_average_norm`.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), over="leaf", norm="average",
        response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


def clip_by_rms(
    tree: PyTree,
    max_rms: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its root mean square.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_rms / rms)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_rms
      >>> print(clip_by_rms(jnp.array([3.0, -3.0, 3.0, 3.0]), 1.0))
      [ 1. -1.  1.  1.]

    Args:
      tree: Pytree of arrays.
      max_rms: Threshold: a number, an array that broadcasts to the means, or a prefix
        tree of these with None for unclipped.
      axis: Axes that a mean covers. Default: all, one per leaf.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves or slices within the threshold are bit-identical.

    References:
      Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
      Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    return clip_by(
        tree, Named("max_rms", max_rms), norm="rms",
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip
