"""Build the optax transformation of an engine, which accepts absent states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from optclip._arrays import _validate
from optclip._arrays._types import PyTree
from optclip._clip import apply
from optclip.transforms._engine import Engine, Step
from optclip.transforms._state import ORDER
from optclip.typing import ClipState


def clipping(
    engine: Engine, decide: Callable[..., Step]
) -> optax.GradientTransformationExtraArgs:
    """Build the transformation of an engine.

    Args:
      engine: The engine.
      decide: Its method `decide`, or that method with some of its options.
    """

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        step = decide(updates, state, params, extra_args)
        clipped, coefficients = apply(step.decision)
        new = engine.recorded(step, coefficients) if engine.record else None
        return clipped, engine.after(state, step, new)

    return lifted(engine, engine.init, update_fn)


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
            _check_recordable(state)
            return update(updates, state, params, **extra_args)
        unused = init(updates) if engine.record else engine.no_state
        clipped, _ = update(updates, unused, params, **extra_args)
        return clipped, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_recordable(state: Any) -> None:
    """Raise unless a transformation that needs no state can record in this one."""
    if not isinstance(state, ClipState):
        wanted = "the ClipState that init returned, None or optax.EmptyState()"
        advice = (
            f"{ORDER} To clip without a state, call the function of the same name,"
            " such as optclip.functional.clip_by_global_norm(grads, max_norm), or build"
            " the transformation with record=False, which accepts any state."
        )
        raise TypeError(_validate.must_be("state", wanted, state, advice))
