"""The clips of many leaves by a common norm, each one call of `clip_by`."""

from __future__ import annotations

import optax

from optclip import scopes
from optclip.norms._interface import of_order
from optclip.thresholds._interface import Named
from optclip.transforms._clip_by_transform import clip_by
from optclip.transforms._passed_norm import clip_by_passed_norm
from optclip.transforms._positions import checks_positions
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


@checks_positions()
def clip_by_global_norm(
    max_norm: Threshold,
    *,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    use_norm: str | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip all leaves by their common norm n, :math:`x \min(1, c / n)`.

    A drop-in for `optax.clip_by_global_norm`: with `record=False` the state has no
    leaves either, and a checkpoint of one restores into the other.

    Args:
      max_norm: the largest norm that is let through, c in the formula: a number, an
        optax schedule, a rule of `optclip.thresholds`. 0 clips to zero; inf measures
        and clips nothing. Keras calls it `global_clipnorm`.
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
      use_norm: the name of an extra argument of `update` that is the norm, such as
        `"grad_norm"`, so that it is not measured again; None measures it.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps the norm of each leaf too. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, a
        mask does not match; with `use_norm`, other norms than the L2 norm of all
        leaves are asked for (`ord`, `mask`, `strict`, `record="leaves"`), or `update`
        lacks the norm.

    Guarantees:
      Those of `functional.clip_by_global_norm`, whose help has a table of edges.

    With `use_norm="grad_norm"`, `update(updates, state, params, grad_norm=norm)` reads
    the norm. The caller guarantees that it is the L2 norm of exactly the updates that
    reach this transformation, over all leaves and all devices. Clipping cannot check
    this. Inside `optax.masked` or `optax.MultiSteps` the norm must cover the part or
    the mean that is clipped. A norm that overflowed to inf counts as non-finite;
    `functional.global_norm` does not overflow.

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
    if use_norm is not None:
        return clip_by_passed_norm(
            use_norm, max_norm, ord=ord, response=response, eps=eps, strict=strict,
            nonfinite=nonfinite, mask=mask, axis_name=axis_name, record=record,
            name=name,
        )  # fmt: skip
    return clip_by(
        Named("max_norm", max_norm, "clip_by_global_norm"), norm=of_order(ord),
        response=response, eps=eps, strict=strict, nonfinite=nonfinite, mask=mask,
        axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


@checks_positions()
def clip_by_group_norm(
    max_norm: ThresholdTree,
    groups: Labels,
    *,
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
    r"""Clip each group of leaves by the norm of the group.

    .. math:: x \leftarrow x \min(1, c_g / \|\text{all leaves of the group } g\|)

    Args:
      max_norm: the largest norm that is let through: a number, an optax schedule or a
        rule of `optclip.thresholds` for all groups, or a dict of these by label; None
        is unclipped.
      groups: the label of each leaf: a tree of strings with the structure of the
        updates, a prefix of it, or a function that makes one of the updates, such as
        `optclip.by_path(...)`; None marks leaves in no group, which are left alone.
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
      record: whether the state keeps what happened in each group, for
        `optclip.metrics`. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation; `metrics` gives its norms by label.

    Raises:
      TypeError: a label is not a string.
      ValueError: a concrete `max_norm` is negative or NaN; at `init` and `update`, the
        labels, the thresholds or a mask do not match.

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
        Named("max_norm", max_norm, "clip_by_group_norm"),
        over=scopes.groups(groups), norm=of_order(ord), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip
