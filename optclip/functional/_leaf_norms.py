"""The pure clips of each leaf, or slice of it, by its own norm."""

from __future__ import annotations

from optclip import scopes
from optclip.functional._clip_by import clip_by
from optclip.norms._interface import of_order
from optclip.thresholds._interface import Named
from optclip.typing import AxisName, Mask, Nonfinite, Number, PyTree, ResponseLike


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
    r"""Clip each leaf by its own norm, :math:`x \min(1, c / \|x\|)`.

    Args:
      tree: any pytree of arrays.
      max_norm: the largest norm that is let through, c in the formula: a number, an
        array that broadcasts to the norms (the shape of the leaf with 1 at `axis`), or
        a prefix tree of these with None for what is not clipped. 0 clips to zero, inf
        clips nothing.
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
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

    Returns:
      A tree like `tree`. Leaves, or slices, inside the norm are kept to the bit. A
      norm is accurate to within 1e-5 for p = 2 and inf, and to within 1e-4 for others
      from 0.5 up.

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
    r"""Clip each leaf by its average norm, :math:`x \min(1, c\,n / \|x\|_2)`.

    The average norm is the L2 norm over the number n of elements, as TensorFlow
    defined it; for the root mean square see `clip_by_rms`.

    Args:
      tree: any pytree of arrays.
      max_norm: the largest norm that is let through, c in the formula: a number, or a
        prefix tree of numbers with None for what is not clipped. 0 clips to zero, inf
        clips nothing.
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
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

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
    r"""Clip each leaf by its root mean square, :math:`x \min(1, c / RMS(x))`.

    Args:
      tree: any pytree of arrays.
      max_rms: the largest root mean square that is let through, c in the formula: a
        number, an array that broadcasts to the norms (the shape of the leaf with 1 at
        `axis`), or a prefix tree of these with None for what is not clipped. 0 clips to
        zero, inf clips nothing.
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
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

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
    return clip_by(
        tree, Named("max_rms", max_rms), norm="rms",
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip
