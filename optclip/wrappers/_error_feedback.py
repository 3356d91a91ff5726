"""Error feedback: what a clip cuts off, the residual, is added to the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optclip._arrays import _leaves
from optclip._arrays._types import PyTree
from optclip.typing import ErrorFeedbackState
from optclip.wrappers._inner import check_state, transformation


def with_error_feedback(
    clip: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Any clip, with what it cut off added to the next updates: on average unbiased.

    .. math:: u_t = \mathrm{clip}(g_t + \Delta_t), \qquad
        \Delta_{t+1} = g_t + \Delta_t - u_t, \qquad \Delta_1 = 0

    Args:
      clip: a clip, or any optax transformation.

    Returns:
      A transformation with the updates' structure, shapes and dtypes. Its memory is as
      large as the parameters, in float32 or wider, and includes the rounding
      of the output.

    Raises:
      TypeError: `clip` is not an optax transformation; at `init` and `update`, a leaf
        is sparse: what is cut off would not be.

    ================== ==============================================================
    edge               what happens
    ================== ==============================================================
    NaN or inf in g    the clip's own policy decides on the updates; entries whose
                       residual would not be finite keep the one they had
    threshold below    the residual grows in every such step: the clip must let through
    most norms         more than comes in
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.with_error_feedback(optclip.clip_by_value(1.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for u in (2.5, 0.0, 0.0, 0.0):
      ...     clipped, state = tx.update(jnp.array([u]), state)
      ...     print(clipped)
      [1.]
      [1.]
      [0.5]
      [0.]

    Source: Elesedy, Hutter, *U-Clip: On-Average Unbiased Stochastic Gradient Clipping*,
    2023, arXiv:2302.02971.
    """
    inner = transformation("clip", clip)

    def init_fn(params: PyTree) -> ErrorFeedbackState:
        flat = _dense_leaves(params)
        pairs = list(zip(flat.leaves, flat.clippable(), strict=True))
        # The leaves have the dtypes in which `update` passes them to the clip.
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
        flat = _dense_leaves(updates)
        old = flat.treedef.flatten_up_to(state.feedback_residual)
        total = [
            x if residual is None else _leaves.widen(_leaves.values(x)) + residual
            for x, residual in zip(flat.leaves, old, strict=True)
        ]
        clipped, clip_state = inner.update(
            flat.rebuild(total), state.feedback_clip, params, **extra_args
        )
        out = [
            u if residual is None else _leaves.narrow(u, _leaves.values(x))
            for u, x, residual in zip(
                flat.treedef.flatten_up_to(clipped), flat.leaves, old, strict=True
            )
        ]
        new = [
            None if residual is None else _finite_or(t - _leaves.widen(u), residual)
            for t, u, residual in zip(total, out, old, strict=True)
        ]
        return flat.rebuild(out), ErrorFeedbackState(flat.rebuild(new), clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _dense_leaves(tree: PyTree) -> _leaves.Flat:
    """The leaves of a tree; raise if one is sparse."""
    flat = _leaves.flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if _leaves.is_sparse(leaf):
            raise TypeError(
                f"{_leaves.named(path, 'The')} must be dense, got a BCOO"
                " matrix: what is cut off is kept as a dense array. Give its"
                " todense(), or leave it out by optax.masked."
            )
    return flat


def _finite_or(new: jax.Array, old: jax.Array) -> jax.Array:
    """The new residual, and the old one where the new is not finite."""
    return jnp.where(jnp.isfinite(new), new, old)
