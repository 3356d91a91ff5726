"""Optimizer steps that share their parameters and moments, donated, as in training."""

from collections.abc import Callable
from typing import Any

import jax
import optax

import optclip
from benchmarks.held import compiled
from benchmarks.timing import Contender

Tree = Any
Gradients = Callable[..., Tree]  # from the parameters and the arguments of the step


class Shared:
    """Parameters and the state of an optimizer, stepped on by all contenders in turn.

    They are never reset: a step moves them a little, and its cost does not depend on it.
    """

    def __init__(self, params: Tree, optimizer: optax.GradientTransformation) -> None:
        self._optimizer = optimizer
        # Computed, so that these buffers belong to XLA and donating them is no copy.
        self._state = jax.jit(lambda p: (p, optimizer.init(p)))(params)

    def contender(self, clip: Any, gradients: Gradients, *arguments: Any) -> Contender:
        """The step by clip (or None), with gradients made from the arguments."""
        optimizer = self._optimizer
        own = None if clip is None else jax.jit(clip.init)(self._state[0])

        def step(state: Any, own: Any, *arguments: Any) -> Any:
            params, moments = state
            updates = gradients(params, *arguments)
            if clip is not None:
                updates, own = clip.update(updates, own, params)
            updates, moments = optimizer.update(updates, moments, params)
            return (optax.apply_updates(params, updates), moments), own

        run, facts = compiled(step, self._state, own, *arguments, donate=(0, 1))

        def call() -> None:
            nonlocal own
            self._state, own = jax.block_until_ready(run(self._state, own, *arguments))

        return Contender(call, facts=facts)


def transformations(limit: float) -> dict[str, Any]:
    """The clips of a step, as one would put them in `optax.chain`."""
    return {
        "unclipped": None,
        "optclip": optclip.clip_by_global_norm(limit),
        "optclip, silent": optclip.clip_by_global_norm(limit, record=False),
        "optax": optax.clip_by_global_norm(limit),
    }
