"""Convert an engine to an optax transformation that accepts absent states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from optclip._arrays._types import PyTree
from optclip.transforms import _state
from optclip.transforms._engine import Engine
from optclip.typing import ClipState


def lifted(
    engine: Engine,
    init: Callable[..., ClipState],
    update: Callable[..., tuple[PyTree, ClipState]],
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation.

    If it neither records nor has a memory, its state is optax's `EmptyState`, and it
    accepts any state, as optax's own clipping does. If it only records, it also accepts
    None and `EmptyState`, and then records nothing. Each state is returned unchanged.
    """
    if engine.needs_state:
        return optax.GradientTransformationExtraArgs(init, update)

    def init_fn(params: PyTree) -> ClipState | optax.EmptyState:
        state = init(params)  # Raises the errors of bad arguments.
        return state if engine.record else optax.EmptyState()

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        is_absent = state is None or isinstance(state, optax.EmptyState)
        if engine.record and not is_absent:
            _state.check_recordable(state)
            return update(updates, state, params, **extra_args)
        like = updates if params is None else params
        unused = init(like) if engine.record else engine.no_state
        clipped, _ = update(updates, unused, params, **extra_args)
        return clipped, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
