"""Clip many leaves by a common norm, and compute that norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import _scopes as scopes
from .._arrays import _axis_names, _leaves, _validate
from .._arrays._batching import Batched
from .._arrays._numerics import as_array
from .._clip import SCALE, Clip, lay_out
from .._norms import flush_small, of_order
from .._scopes import TREE
from .._thresholds import Named
from .._typing import (
    AxisName,
    Labels,
    Mask,
    Nonfinite,
    Number,
    PyTree,
    ResponseLike,
)
from ._clip_by import clip_by, resolved_without_step, run


def global_norm(
    tree: PyTree,
    *,
    ord: float | None = None,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> jax.Array:
    """Compute the norm of all leaves together.

    The norm is `(sum(abs(x) ** p)) ** (1 / p)` over all elements, in float32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import global_norm
      >>> half = {"w": jnp.array([300.0, 400.0], jnp.float16), "frozen": None}
      >>> print(global_norm(half))
      500.0

    Args:
      tree: Pytree of arrays.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      mask: Leaves to measure: a tree of bools or a function. Default: all.

    Returns:
      A scalar: float32, or float64 if a leaf is float64. It is 0 for a tree without
      numbers, inf above the largest float, and NaN or inf if an element is.

    Guarantees:
      The relative error is at most 1e-5 for p = 2 and inf, and 1e-4 for other orders
      from 0.5 up, in every dtype. Squares do not overflow. The derivative at zero is 0.
    """
    norm = of_order(ord)
    _axis_names.check(axis_name)
    layout = lay_out(TREE, tree, (mask, None, None), axis_name)
    return norm.measure(layout.blocks).norms.entries()[0]


def clip_by_group_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    groups: Labels,
    *,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Clip each group of leaves by the norm of the group.

    Each group is multiplied by `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_group_norm
      >>> w, b, head = jnp.array([3.0]), jnp.array([4.0]), jnp.array([0.5])
      >>> grads = {"w": w, "b": b, "head": head}
      >>> labels = {"w": "body", "b": "body", "head": "head"}
      >>> clipped, norms = clip_by_group_norm(grads, 1.0, labels)
      >>> print(clipped["w"], clipped["b"], clipped["head"], norms["body"])
      [0.6] [0.8] [0.5] 5.0

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number, or a dict of numbers by label with None for
        unclipped.
      groups: Label of each leaf: a tree of strings or a function such as
        `optclip.by_path(...)`. Leaves labeled None are unclipped.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and a dict with the norm of each group before clipping.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), over=scopes.groups(groups),
        norm=of_order(ord), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip


def clip_by_global_norm(
    tree: PyTree,
    max_norm: Number,
    *,
    use_norm: Number | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, jax.Array]:
    """Clip all leaves by their common norm.

    All leaves are multiplied by `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_global_norm
      >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
      >>> clipped, norm = clip_by_global_norm(grads, 1.0)
      >>> print(clipped["w"], clipped["b"], norm)
      [0.6 0. ] [0.8] 5.0

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number. 0 clips to zero, inf clips nothing.
      use_norm: Norm of the tree, if already computed. An infinite norm counts as
        non-finite. Default: None, compute it.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and the norm before clipping: a scalar, float32 or wider.

    Raises:
      ValueError: `strict` is combined with `use_norm`, whose rounding error is unknown.

    Guarantees:
      Within the threshold every leaf is bit-identical. Otherwise all leaves are
      multiplied by one factor in float32 or wider, and the norm is at most
      `max_norm * (1 + 2e-5)`, or `(1 + 2e-4)` for orders other than 2 and inf, before
      the cast to each dtype. With `strict=True` it is at most `max_norm` after the
      cast, and norms within 1.3e-4 below the threshold are clipped too. A norm above
      3.4e38 reads inf and follows `nonfinite`. The derivative at norm 0 is the
      identity.

    References:
      Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
      Networks", 2012, arXiv:1211.5063; `tf.clip_by_global_norm`.
    """
    how = resolved_without_step(response)
    clip = Clip(
        TREE, of_order(ord), how, SCALE, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    threshold = Named("max_norm", max_norm)
    return run(clip, tree, threshold, norms=_norm_argument(use_norm, strict=strict))


def _norm_argument(norm: Number | None, *, strict: bool) -> Batched | None:
    """Return the checked `use_norm`, None to compute the norm."""
    if norm is None:
        return None
    if strict:
        raise ValueError(
            "strict=True cannot be combined with use_norm=, since the rounding error"
            " of the passed norm is unknown. Remove one of them."
        )
    wanted = "a real scalar of at least 0, the norm of the tree, or None to compute it"
    _validate.passed_norm("use_norm", norm, wanted)
    scalar = as_array(norm)
    dtype = _leaves.real_dtype(jnp.promote_types(scalar.dtype, jnp.float16))
    return Batched([flush_small(scalar.astype(dtype))])
