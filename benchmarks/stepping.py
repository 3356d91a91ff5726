"""Build optimizer steps that share donated parameters and moments, as in training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.donated_buffers import compiled
from benchmarks.timing import Contender

Tree = Any
# Computes the loss and the gradients from the parameters and the arguments of the step.
Gradients = Callable[..., tuple[jax.Array, Tree]]


class Stepping:
    """Hold parameters and an optimizer state, which all contenders update in turn.

    They are never reset, since the cost of a step does not depend on their values.
    """

    def __init__(
        self,
        params: Tree,
        optimizer: optax.GradientTransformation,
        gradients: Gradients,
        *arguments: Any,
    ) -> None:
        self._optimizer = optimizer
        self._gradients, self._arguments = gradients, arguments
        # Outputs of a program are buffers of XLA, which can be donated without a copy.
        self._state = jax.jit(lambda p: (p, optimizer.init(p)))(params)
        self._loss: Any = None

    def contender(self, clip: Any) -> Contender:
        """Build the contender that clips and then steps, whose result is unchecked."""
        clip_state = jax.jit(clip.init)(self._state[0])
        step = step_of(clip, self._optimizer, self._gradients)
        run, facts = compiled(
            step, self._state, clip_state, *self._arguments, donate=(0, 1)
        )

        def call() -> None:
            nonlocal clip_state
            self._state, clip_state, self._loss = jax.block_until_ready(
                run(self._state, clip_state, *self._arguments)
            )

        return Contender(call, facts=facts)


def step_of(
    clip: Any, optimizer: optax.GradientTransformation, gradients: Gradients
) -> Callable[..., Any]:
    """Return a training step of `(params, moments)`, `clip_state` and arguments."""

    def step(state: Any, clip_state: Any, *arguments: Any) -> Any:
        loss, updates = gradients(state[0], *arguments)
        updates, clip_state = clip.update(updates, clip_state, state[0])
        params, moments = state
        updates, moments = optimizer.update(updates, moments, params)
        return (optax.apply_updates(params, updates), moments), clip_state, loss

    return step


def with_loss(gradients: Callable[..., Tree]) -> Gradients:
    """Return gradients with a number in place of a loss, computed before them.

    A training step returns its loss, the only result with a new address in each step.
    On a GPU, XLA updates each kernel that uses such a buffer, and stores other scalars
    in it until the result is written: if that is after clipping, in up to 160 kernels.
    """

    def with_number(params: Tree, *arguments: Any) -> tuple[jax.Array, Tree]:
        number = jax.tree.leaves(params)[0].ravel()[0].astype(jnp.float32)
        leaves, structure = jax.tree.flatten(gradients(params, *arguments))
        # The barrier orders the number before the kernels that read the first leaf.
        number, leaves[0] = jax.lax.optimization_barrier((number, leaves[0]))
        return number, structure.unflatten(leaves)

    return with_number
