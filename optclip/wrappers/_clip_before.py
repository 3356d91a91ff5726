"""Clipping before an optimizer, with the optimizer's state stored first."""

from __future__ import annotations

from typing import Any

import jax
import optax

from optclip._arrays import _validate
from optclip._arrays._types import PyTree
from optclip.wrappers._inner import transformation


def clip_before(
    inner: optax.GradientTransformation, clip: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Apply `clip`, then `inner`, and store the state of `inner` first.

    The updates equal those from `optax.chain(clip, inner)`. Code that reads the
    optimizer's state by position, such as `opt_state[0].mu`, continues to work.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.clip_before(optax.adamw(0.1), optclip.clip_by_global_norm(1.0))
      >>> grads = params = jnp.array([3.0, 4.0])
      >>> _, state = tx.update(grads, tx.init(params), params)
      >>> print(state[0].count, optclip.metrics(state)["clip/norm"])
      1 5.0

    Args:
      inner: The optimizer to wrap, such as `optax.adamw(3e-4)`.
      clip: The transformation that clips the gradients.

    Returns:
      A transformation. Its state is `(*inner_state, clip_state)` if the state of
      `inner` is a plain, non-empty tuple, as for a chain. Otherwise it is
      `(inner_state, clip_state)`.

    Raises:
      TypeError: An argument is not an optax transformation. In `update`: `state` is not
        a tuple of both states.

    See Also:
      `clip_after`, to clip an optimizer's updates.
    """
    first = transformation("clip", clip)
    second = transformation("inner", inner)

    def joined(inner_state: PyTree, clip_state: PyTree) -> tuple[PyTree, ...]:
        # A named tuple is one state, so it is not unpacked.
        if type(inner_state) is tuple and inner_state:
            return (*inner_state, clip_state)
        return inner_state, clip_state

    def init_fn(params: PyTree) -> tuple[PyTree, ...]:
        return joined(second.init(params), first.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        if type(state) is not tuple or len(state) < 2:
            wanted = "the tuple that init of clip_before returned"
            advice = (
                "The optimizer's state alone lacks the state of `clip`; create a new"
                " one with tx.init(params)."
            )
            raise TypeError(_validate.must_be("state", wanted, state, advice))
        *inner_states, clip_state = state
        inner_state = tuple(inner_states)
        # A single entry is either the state itself or the only entry of a tuple of
        # states. Only `init` shows which.
        if len(inner_state) == 1:
            shapes = jax.eval_shape(second.init, updates)
            is_tuple = type(shapes) is tuple and len(shapes) == 1
            inner_state = inner_state if is_tuple else inner_state[0]
        clipped, clip_state = first.update(updates, clip_state, params, **extra_args)
        updates, inner_state = second.update(clipped, inner_state, params, **extra_args)
        return updates, joined(inner_state, clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
