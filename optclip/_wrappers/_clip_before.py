"""Clipping before an optimizer, with the optimizer's state stored first."""

from __future__ import annotations

from typing import Any

import jax
import optax

from .._arrays._types import PyTree
from ._checks import transformation


def clip_before(
    inner: optax.GradientTransformation, clip: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Apply `clip`, then `inner`, and store the state of `inner` first.

    The optimizer is the first argument, although it is applied last; exchanged, they
    would clip the updates of the optimizer instead.

    The updates equal those from `optax.chain(clip, inner)`. Code that reads the
    optimizer's state by position, such as `opt_state[0].mu`, continues to work.
    Threshold rules of `clip` receive the state of `inner` before the step as
    `seen.extra["inner_state"]`.

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
      `inner` is a plain, non-empty tuple, as for a chain; otherwise
      `(inner_state, clip_state)`.

    Raises:
      TypeError: In `update`: `state` is not a tuple of both states in this order.

    See Also:
      `clip_after`, to clip an optimizer's updates.
    """
    first = transformation("clip", clip)
    second = transformation("inner", inner)

    def init_fn(params: PyTree) -> tuple[PyTree, ...]:
        return _joined(second.init(params), first.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        # Only `init` shows whether a single entry is the state of `inner` or the only
        # entry of a tuple of states. Without arrays, it costs no memory.
        shapes = jax.eval_shape(second.init, updates if params is None else params)
        _check_state(state, shapes)
        inner_state = state[:-1] if _is_unpacked(shapes) else state[0]
        clip_args = extra_args | {"inner_state": inner_state}
        clipped, clip_state = first.update(updates, state[-1], params, **clip_args)
        updates, inner_state = second.update(clipped, inner_state, params, **extra_args)
        return updates, _joined(inner_state, clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _joined(inner_state: PyTree, clip_state: PyTree) -> tuple[PyTree, ...]:
    unpacked = inner_state if _is_unpacked(inner_state) else (inner_state,)
    return (*unpacked, clip_state)


def _is_unpacked(inner_state: PyTree) -> bool:
    # A named tuple is one state, so it is not unpacked.
    return type(inner_state) is tuple and len(inner_state) > 0


def _check_state(state: Any, inner_state: PyTree) -> None:
    """Raise unless `state` is a state of `inner` followed by one more entry."""
    expected = jax.tree.structure(_joined(inner_state, None))
    if type(state) is tuple and jax.tree.structure((*state[:-1], None)) == expected:
        return
    swapped = "*state[1]" if _is_unpacked(inner_state) else "state[1]"
    got = type(state).__name__
    if type(state) is tuple:
        got = f"({', '.join(type(x).__name__ for x in state)})"
    raise TypeError(
        "`state` must be the tuple that clip_before's init returned, with the state of"
        f" `inner` first and that of `clip` last, got {got}. Create a"
        f" state with tx.init(params), or pass ({swapped}, state[0]) for a state of"
        " optax.chain(clip, inner)."
    )
