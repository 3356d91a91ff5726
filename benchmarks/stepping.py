"""Build optimizer steps that share donated parameters and moments, as in training."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.donated_buffers import compiled
from benchmarks.exact import Arrays, Factors, places
from benchmarks.timing import Contender

Tree = Any
# Computes the loss and the gradients from the parameters and the arguments of the step.
Gradients = Callable[..., tuple[jax.Array, Tree]]

# The eps of the dtype by which two evaluation orders of the same formula may differ.
ROUNDINGS = 8


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
        slack: float = 0.0,
    ) -> None:
        self._optimizer = optimizer
        self._gradients, self._arguments = gradients, arguments
        self._slack = slack
        # Outputs of a program are buffers of XLA, which can be donated without a copy.
        self._state = jax.jit(lambda p: (p, optimizer.init(p)))(params)
        self._alone = jax.jit(gradients)
        self._loss: Any = None

    def contender(self, clip: Any, factors: Factors | None = None) -> Contender:
        """Build the contender that clips and then steps.

        `factors` computes the expected coefficients. Without it the result is not
        checked, since a check takes seconds for a large model.
        """
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

        expected: list[Arrays] = []

        def prepare() -> None:
            if factors is not None and not expected:
                expected.append(self._expected(factors))

        def error(_: Any) -> float:
            if factors is None:
                return 0.0
            pairs = zip(_sampled(self._state), expected[0], strict=True)
            return max(_error(*pair, self._slack) for pair in pairs)

        return Contender(call, prepare, error, facts)

    def _expected(self, factors: Factors) -> Arrays:
        """Return a sample of the next state, with gradients that NumPy clips."""
        params = jax.tree.leaves(jax.device_get(self._state[0]))
        _, tree = jax.device_get(self._alone(self._state[0], *self._arguments))
        gradients, structure = jax.tree.flatten(tree)
        coefficients = factors(gradients, params)
        clipped = [
            (x.astype(np.float64) * coefficient).astype(x.dtype)
            for x, coefficient in zip(gradients, coefficients, strict=True)
        ]
        step = jax.jit(functools.partial(_stepped, self._optimizer))
        return _sampled(step(structure.unflatten(clipped), *self._state))


def step_of(
    clip: Any, optimizer: optax.GradientTransformation, gradients: Gradients
) -> Callable[..., Any]:
    """Return a training step of `(params, moments)`, `clip_state` and arguments."""

    def step(state: Any, clip_state: Any, *arguments: Any) -> Any:
        loss, updates = gradients(state[0], *arguments)
        updates, clip_state = clip.update(updates, clip_state, state[0])
        return _stepped(optimizer, updates, *state), clip_state, loss

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


def _stepped(
    optimizer: optax.GradientTransformation, updates: Tree, params: Tree, moments: Tree
) -> tuple[Tree, Tree]:
    updates, moments = optimizer.update(updates, moments, params)
    return optax.apply_updates(params, updates), moments


def _sampled(state: Tree) -> Arrays:
    leaves = map(np.asarray, jax.tree.leaves(state))
    return [x.reshape(-1)[places(x.size)] for x in leaves]


def _error(got: np.ndarray, want: np.ndarray, slack: float) -> float:
    """Return the largest error over the largest number, minus the rounding allowed."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return 0.0
    allowed = max(ROUNDINGS * float(jnp.finfo(want.dtype).eps), slack)
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
    return float(np.maximum(0.0, error - allowed))
