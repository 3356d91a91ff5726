"""An engine as an optax transformation, stateless where nothing is kept."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
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
    """The transformation, with the state of optax's own clips if it keeps nothing."""
    if not engine.is_stateless:
        return optax.GradientTransformationExtraArgs(init, update)

    def init_fn(params: PyTree) -> optax.EmptyState:
        init(params)  # It raises what there is to raise.
        return optax.EmptyState()

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        _state.check_empty(state)
        nothing = ClipState(
            jnp.zeros((), jnp.int32), [()] * len(engine.rules.by_argument), {}
        )
        return update(updates, nothing, params, **extra_args)[0], state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
