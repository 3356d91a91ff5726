"""Error feedback: add the part that clipping removed to the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves, _placement
from .._arrays._types import PyTree
from .._clip import cast
from .._transforms import clip_by_value
from .._typing import ErrorFeedbackState
from ._checks import check_state, transformation

_SPARSE = "whose residual would be a dense array"


def uclip(
    clip: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Add the part that clipping removes to the next updates (U-Clip).

    Clipping is then unbiased on average. The residual `r` starts at 0, and in each
    step `u = clip(g + r)`, then `r = g + r - u`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.uclip(optclip.clip_by_value(1.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for u in (2.5, 0.0, 0.0, 0.0):
      ...     clipped, state = tx.update(jnp.array([u]), state)
      ...     print(clipped)
      [1.]
      [1.]
      [0.5]
      [0.]

    Args:
      clip: The clipping transformation to wrap, or any other optax transformation.
        Default: `clip_by_value(1.0)`.

    Returns:
      A transformation; place it before the optimizer. Its residual is as large as the
      parameters, in float32 or wider. The output is rounded toward zero in the dtype of
      each leaf, so that it stays within the threshold of `clip`; the residual includes
      the rounding errors.

    Raises:
      TypeError: A leaf is sparse, since its residual would be dense.

    Edge cases:
      - NaN or inf: `nonfinite` of `clip` determines the updates. Entries whose new
        residual would not be finite keep the old one.
      - Most norms above the threshold: the residual grows without limit. Raise the
        threshold.

    References:
      Elesedy and Hutter, *U-Clip: On-Average Unbiased Stochastic Gradient Clipping*,
      2023, arXiv:2302.02971.
    """
    inner = transformation("clip", clip_by_value(1.0) if clip is None else clip)

    def init_fn(params: PyTree) -> ErrorFeedbackState:
        flat = _leaves.flatten_dense(_placement.on_device(params), _SPARSE)
        pairs = list(zip(flat.leaves, flat.clippable(), strict=True))
        # `clip.init` receives the dtypes in which `update` passes the leaves to it.
        leaves = [
            _leaves.widen(_leaves.values(x)) if is_live else x for x, is_live in pairs
        ]
        residual = [
            jnp.zeros_like(x) if is_live else None
            for x, (_, is_live) in zip(leaves, pairs, strict=True)
        ]
        return ErrorFeedbackState(
            flat.rebuild(residual), inner.init(flat.rebuild(leaves))
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ErrorFeedbackState]:
        check_state(state, ErrorFeedbackState)
        flat = _leaves.flatten_dense(_placement.on_device(updates), _SPARSE)
        old = flat.treedef.flatten_up_to(_placement.on_device(state.feedback_residual))
        total = [
            x if residual is None else _leaves.widen(_leaves.values(x)) + residual
            for x, residual in zip(flat.leaves, old, strict=True)
        ]
        clipped, clip_state = inner.update(
            flat.rebuild(total), state.feedback_clip, params, **extra_args
        )
        # Rounding towards zero keeps the norm that `clip` guaranteed, and the largest
        # number in place of inf. What it removes stays in the residual.
        out = [
            u if residual is None else _rounded(u, _leaves.values(x))
            for u, x, residual in zip(
                flat.treedef.flatten_up_to(clipped), flat.leaves, old, strict=True
            )
        ]
        new = [
            None if residual is None else _finite_or(t - _leaves.widen(u), residual)
            for t, u, residual in zip(total, out, old, strict=True)
        ]
        residual = _placement.back(flat.rebuild(new), state.feedback_residual)
        left = _placement.back(flat.rebuild(out), updates)
        return left, ErrorFeedbackState(residual, clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _rounded(u: jax.Array, like: jax.Array) -> jax.Array:
    return cast(u, like, towards_zero=u.dtype != like.dtype)


def _finite_or(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the new residual, with the old one in entries that are not finite."""
    return jnp.where(jnp.isfinite(new), new.astype(old.dtype), old)
