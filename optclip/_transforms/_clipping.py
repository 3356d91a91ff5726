"""The clipping transformations: `clip_by`, and one function for each of its uses.

`clip_by` builds a `Clip` from its arguments and an `Engine` that runs it in training.
"""

from __future__ import annotations

import optax

from .. import _scopes as scopes
from .._arrays import _validate
from .._arrays._call_errors import explains_call
from .._clip import clip_of
from .._norms import L2, NormLike, as_norm, of_order
from .._responses import as_response
from .._scopes import TREE, ScopeLike, as_scope, declaring
from .._thresholds import Named, as_named, bounds
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
from ._engine import Engine, check_use_norm, transformation_of
from ._rules import rules_of


@explains_call
def clip_by(
    threshold: ThresholdTree,
    *,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    """Build a clipping transformation from its parts.

    Each norm `n` of the updates is compared with its threshold `c`, and the elements
    that share the norm are multiplied by `response(n, c)`. The other transformations
    call this one; shared options are explained in full here.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0), response="smooth")
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(2))
      [[0.59 0.  ]
       [0.78 0.71]]

    Args:
      threshold: Where to clip: a number or array of at least 0, an optax schedule, a
        rule of `optclip.thresholds`, or your own object with `init(norm)` and
        `update(seen, memory)`. For scopes of leaves and groups also a prefix tree of
        these, in which None means unclipped. 0 clips to zero; inf measures and clips
        nothing. A traced negative threshold counts as 0.
      over: Which elements share a norm: `"tree"` (default), `"leaf"`, `"element"`,
        `axes(...)`, `units(...)`, `groups(...)`, `layers(...)`, `matrices(...)`,
        `singular_values(...)`, or an instance of a subclass of `optclip.scopes.Scope`.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, an order p above 0,
        or an `optclip.norms.Norm`.
      response: What happens above the threshold. A name: `"hard"` (default) scales to
        the threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. Or an object with `coefficient(norm, threshold)`, or a
        function of these two, which is also called below the threshold; return 1 there
        to keep updates unchanged. If the threshold is a parameter that may be negative,
        such as an exponent, declare it by `power.signed = True`; otherwise a schedule
        below 0 counts as 0.
      eps: Number of at least 0 added to each norm before the division, for elements to
        their modulus. Default: 0. PyTorch uses 1e-6.
      strict: Whether the norm after rounding never exceeds the threshold. It then clips
        to `threshold * (1 - 1.3e-4)` and rounds toward zero in the dtype of each leaf.
        A threshold below 2**-36 (2**-450 for float64) counts as 0. Orders below 0.5 are
        not covered.
      nonfinite: What NaN and inf do. `"propagate"` (default) makes all elements that
        share the norm NaN, `"zero"` makes them zero, and `"raise"` raises an error
        under `jax.experimental.checkify`. For single elements `"propagate"` keeps
        NaN, and inf moves to its bound if `response` is `"hard"`, `"normalize"` or
        `"proportional"` and `eps` is 0.
      mask: Leaves to clip; other leaves are neither measured nor scaled. A tree of
        bools, a prefix of one, or a function of the updates that returns one, such as
        `optclip.by_path(lambda path: "embed" not in path)`. Default: all.
      norm_mask: Leaves that enter the norm, in the same forms. Default: `mask`.
      clip_mask: Leaves that are scaled, in the same forms. Default: `mask`.
      axis_name: Mapped axes that split the leaves, which norms then span: a name, a
        tuple of names (`()` for none), a `PartitionSpec`, a prefix tree of these, or a
        function of the updates. Default: read from the type of each leaf, which
        `jax.shard_map` sets.
      record: Whether the state records each step for `optclip.metrics`. `"leaves"`
        records one entry per norm, and for the tree also the norm of each leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation with a `ClipState` of fixed structure. With `record=False`
      and a fixed threshold the state is `optax.EmptyState()`, as in optax, and `update`
      accepts and returns any state.

    Raises:
      ValueError: An argument is out of range, such as a negative or NaN threshold; a
        leaf lacks an axis; a tree of thresholds, masks, labels or axis names does not
        match the updates; a threshold differs between devices that share a norm; or a
        leaf is unreduced over a mesh axis.

    Guarantees:
      Unclipped leaves are bit-identical. With the hard response the norm of clipped
      leaves is at most `threshold * (1 + 2e-5)`, and `(1 + 2e-4)` for orders other than
      2 and inf, before the cast to the dtype of each leaf.
    """
    scope = declaring(as_scope(over), as_named(threshold).value)
    clip = clip_of(
        scope, as_norm(norm), as_response(response), eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name,
    )  # fmt: skip
    return transformation_of(Engine(clip, rules_of(threshold, clip), record, name))


@explains_call
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

    With `use_norm="grad_norm"`, `update(updates, state, params, grad_norm=norm)` reads
    the norm. It must be the L2 norm of exactly the updates that reach this
    transformation, over all leaves and all devices; this cannot be checked. Inside
    `optax.masked` or `optax.MultiSteps`, pass the norm of the masked or averaged
    updates. Compute it with `optclip.functional.global_norm`, which does not overflow:
    an infinite norm counts as non-finite.

    Guarantees:
      Within the threshold every leaf is bit-identical. Otherwise the norm is at most
      `max_norm * (1 + 2e-5)`, or `(1 + 2e-4)` for orders other than 2 and inf, before
      the cast to each dtype. With `strict=True` it is at most `max_norm` after the
      cast. `optclip.functional.clip_by_global_norm` covers overflow and derivatives.

    References:
      Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
      Networks", 2012, arXiv:1211.5063; `global_clipnorm` of Keras.
    """
    threshold = Named("max_norm", max_norm, "clip_by_global_norm")
    if use_norm is not None:
        check_use_norm(use_norm, ord=ord, strict=strict, mask=mask, record=record)
        clip = clip_of(
            TREE, L2, as_response(response), eps=eps, nonfinite=nonfinite,
            axis_name=axis_name,
        )  # fmt: skip
        rules = rules_of(threshold, clip)
        return transformation_of(Engine(clip, rules, record, name, use_norm))
    return clip_by(
        threshold, norm=of_order(ord),
        response=response, eps=eps, strict=strict, nonfinite=nonfinite, mask=mask,
        axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


@explains_call
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


@explains_call
def clip_by_value(
    limit: ThresholdTree | None = None,
    *,
    lower: ThresholdTree | None = None,
    upper: ThresholdTree | None = None,
    response: ResponseLike = "hard",
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    """Clip each element to `[-limit, limit]`, or to `[lower, upper]`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0)
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  1. ]

    Args:
      limit: Symmetric bound: a number, array that broadcasts to each leaf, optax
        schedule, `optclip.thresholds` rule, or prefix tree of these. Complex elements
        are clipped by their modulus. Pass either `limit` or `lower` and `upper`.
      lower: Lower bound of any sign, in the same forms. Default: None, unbounded.
      upper: Upper bound of any sign, in the same forms; for complex elements at least
        0; a traced negative one counts as 0. Default: None, unbounded.
      response: What happens outside the bounds. `"hard"` (default) moves elements to
        the bound, `"drop"` sets them to 0; `"normalize"` moves all elements. Other
        responses need a symmetric `limit`.
      strict: Whether bounds are rounded toward zero in the dtype of each leaf.
      nonfinite: `"propagate"` keeps NaN; inf moves to its bound if `response` is
        `"hard"`, `"normalize"` or `"proportional"`, to 0 if it is `"drop"`, and
        otherwise becomes NaN. `"zero"` zeros both, `"raise"` raises under
        `jax.experimental.checkify`.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      record: Whether to record each step; `"leaves"` records every metric per leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation. Elements within the bounds are bit-identical.

    Raises:
      TypeError: Both forms are passed, or neither.
      ValueError: A bound is NaN, `limit` is negative, or `lower > upper`.

    References:
      `tf.clip_by_value`; `clipvalue` of Keras; `optax.clip`.
    """
    two = _validate.is_two_sided(limit, lower, upper)
    return clip_by(
        bounds(lower, upper) if two else Named("limit", limit, "clip_by_value"),
        over="element", response=response, strict=strict, nonfinite=nonfinite,
        mask=mask, record=record, name=name,
    )  # fmt: skip


@explains_call
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


@explains_call
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


@explains_call
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
