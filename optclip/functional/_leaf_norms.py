"""The pure clips of each leaf, or slice of it, by its own norm."""

from __future__ import annotations

from optclip import norms, responses, scopes
from optclip._clip._clip import ScalingClip
from optclip.functional._lift import run
from optclip.norms._norm import of_order
from optclip.typing import AxisName, Mask, Nonfinite, Number, PyTree


def clip_by_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    r"""Clip each leaf by its own norm, :math:`x \min(1, c / \|x\|)`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a number or array that broadcasts to the norms (the leaf's shape
        with 1 at `axis`, or a scalar), or a prefix tree of these.
      axis: the axes that each norm is taken over; None is all.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, clip_mask, axis_name: see `optclip.functional`.

    Returns:
      A tree like `tree`. Leaves, or slices, inside the norm are kept to the bit. A
      norm is right to 1e-6 for p = 1, 2 and inf; of slices, and for others from 0.5
      up, to 1e-5.

    Raises:
      ValueError: `max_norm` is negative or NaN, or fits no norm; a leaf lacks `axis`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_norm
      >>> print(clip_by_norm(jnp.array([[3.0, 0.1], [4.0, 0.2]]), 1.0, axis=0))
      [[0.6 0.1]
       [0.8 0.2]]

    Source: `tf.clip_by_norm`.
    """
    scope = scopes.LEAF if axis is None else scopes.axes(axis)
    clip = ScalingClip(
        scope, of_order(ord), responses.Hard(), eps, strict, nonfinite,
        norm_mask=clip_mask, clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, "max_norm", max_norm)[0]


def clip_by_average_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    r"""Clip each leaf by its average norm, :math:`x \min(1, c\,n / \|x\|_2)`.

    The average norm is the L2 norm over the number n of elements, as TensorFlow
    defined it; for the root mean square see `clip_by_rms`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a number, or a prefix tree of numbers.
      eps, strict, nonfinite, clip_mask, axis_name: see `optclip.functional`.

    Returns:
      A tree like `tree`.

    Raises:
      ValueError: `max_norm` is negative or NaN, or fits no norm.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_average_norm
      >>> print(clip_by_average_norm(jnp.array([3.0, 4.0]), 0.5))
      [0.6 0.8]

    Source: `tf.compat.v1.clip_by_average_norm`.
    """
    clip = ScalingClip(
        scopes.LEAF, norms.AVERAGE, responses.Hard(), eps, strict, nonfinite,
        norm_mask=clip_mask, clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, "max_norm", max_norm)[0]


def clip_by_rms(
    tree: PyTree,
    max_rms: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    r"""Clip each leaf by its root mean square, :math:`x \min(1, c / RMS(x))`.

    Args:
      tree: any pytree of arrays.
      max_rms: c, a number or array that broadcasts to the norms, or a prefix tree.
      axis: the axes that each mean is taken over; None is all.
      eps, strict, nonfinite, clip_mask, axis_name: see `optclip.functional`.

    Returns:
      A tree like `tree`.

    Raises:
      ValueError: `max_rms` is negative or NaN, or fits no norm; a leaf lacks `axis`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_rms
      >>> print(clip_by_rms(jnp.array([3.0, -3.0, 3.0, 3.0]), 1.0))
      [ 1. -1.  1.  1.]

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    scope = scopes.LEAF if axis is None else scopes.axes(axis)
    clip = ScalingClip(
        scope, norms.RMS, responses.Hard(), eps, strict, nonfinite,
        norm_mask=clip_mask, clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, "max_rms", max_rms)[0]
