"""Clip many leaves by a common norm, as optax transformations."""

from __future__ import annotations

import optax

from .. import _scopes as scopes
from .._norms import of_order
from .._thresholds import Named
from .._typing import (
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
from ._clip_by_transform import clip_by
from ._passed_norm import clip_by_passed_norm
from ._positions import checks_positions


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
    """Clip all leaves by their common norm.

    All leaves are multiplied by `min(1, max_norm / norm)`. Replaces
    `optax.clip_by_global_norm`; with `record=False` checkpoints of the two are
    interchangeable.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> print(updates["w"], optclip.metrics(state)["clip/norm"])
      [-0.6 -0.8] 5.0

    Args:
      max_norm: Threshold: a number, optax schedule or `optclip.thresholds` rule.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      use_norm: Name of an extra argument of `update` that holds the norm, if already
        computed. Default: None, compute it.
      record: Whether to record each step; `"leaves"` also records each leaf's norm.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.

    Raises:
      ValueError: `use_norm` is combined with `ord`, `mask`, `strict` or
        `record="leaves"`; or `update` lacks the argument that it names.

    Guarantees:
      The same as those of `optclip.functional.clip_by_global_norm`.

    With `use_norm="grad_norm"`, `update(updates, state, params, grad_norm=norm)` reads
    the norm. It must be the L2 norm of exactly the updates that reach this
    transformation, over all leaves and all devices; this cannot be checked. Inside
    `optax.masked` or `optax.MultiSteps`, pass the norm of the masked or averaged
    updates. Compute it with `optclip.functional.global_norm`, which does not overflow:
    an infinite norm counts as non-finite.

    References:
      Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
      Networks", 2012, arXiv:1211.5063; `global_clipnorm` of Keras.
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
    """Clip each group of leaves by the norm of the group.

    Each group is multiplied by `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_group_norm(
      ...     {"body": 1.0, "head": None},
      ...     optclip.by_path(lambda path: "head" if "head" in path else "body"),
      ... )
      >>> updates = {"w": jnp.array([3.0, 4.0]), "head": jnp.array([9.0])}
      >>> print(tx.update(updates, tx.init(updates))[0])
      {'head': Array([9.], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}

    Args:
      max_norm: Threshold: a number, optax schedule or `optclip.thresholds` rule, or a
        dict of these by label with None for unclipped.
      groups: Label of each leaf: a tree of strings or a function such as
        `optclip.by_path(...)`. Leaves labeled None are unclipped.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      record: Whether to record each step, with one entry per group.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.
    """
    return clip_by(
        Named("max_norm", max_norm, "clip_by_group_norm"),
        over=scopes.groups(groups), norm=of_order(ord), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
        record=record, name=name,
    )  # fmt: skip
