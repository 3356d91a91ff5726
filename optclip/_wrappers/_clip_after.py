"""Clipping after an optimizer, with access to the optimizer's gradients."""

from __future__ import annotations

from typing import Any

import optax

from .._arrays._types import PyTree
from .._typing import ClipAfterState
from ._checks import check_state, transformation


def clip_after(
    inner: optax.GradientTransformation, clip: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Clip an optimizer's updates by rules that also read its gradients.

    Equal to `optax.chain(inner, clip)`, except that threshold rules receive two more
    entries in `seen.extra`: `gradients`, the updates passed to `inner`, and
    `inner_state`, its new state.

    Example:
      Limit the length of Adam's updates to the length of the gradients:

      >>> import jax.numpy as jnp, optax, optclip
      >>> length = optclip.functional.global_norm
      >>> class OfGradients:
      ...     def init(self, norm):
      ...         return ()
      ...     def update(self, seen, memory):
      ...         return length(seen.extra["gradients"]), memory
      >>> tx = optclip.clip_after(
      ...     optax.scale_by_adam(), optclip.clip_by_global_norm(OfGradients())
      ... )
      >>> grads = jnp.array([3e-3, 4e-3])
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(f"{length(updates):.4f}")
      0.0050

    Args:
      inner: The optimizer to wrap, or a part of one, such as `optax.scale_by_adam()`.
      clip: The transformation that clips the updates of `inner`.

    Returns:
      A transformation.
    """
    first = transformation("inner", inner)
    second = transformation("clip", clip)

    def init_fn(params: PyTree) -> ClipAfterState:
        return ClipAfterState(first.init(params), second.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ClipAfterState]:
        check_state(state, ClipAfterState)
        inner_updates, inner_state = first.update(
            updates, state.after_inner, params, **extra_args
        )
        clip_args = extra_args | {"gradients": updates, "inner_state": inner_state}
        clipped, clip_state = second.update(
            inner_updates, state.after_clip, params, **clip_args
        )
        return clipped, ClipAfterState(inner_state, clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
