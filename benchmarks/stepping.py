"""Optimizer steps that share their parameters and moments, donated, as in training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.donated import compiled
from benchmarks.exact import Arrays, Factors, places
from benchmarks.timing import Contender

Tree = Any
Gradients = Callable[..., Tree]  # from the parameters and the arguments of the step

ROUNDINGS = 8  # of the dtype, by which two orders of the same arithmetic may differ


class Stepping:
    """Parameters and the state of an optimizer, stepped on by all contenders in turn.

    They are never reset: a step moves them a little, and its cost does not depend on it.
    """

    def __init__(
        self,
        params: Tree,
        optimizer: optax.GradientTransformation,
        gradients: Gradients,
        *arguments: Any,
        slack: float = 0.0,
    ) -> None:
        self._gradients, self._arguments = gradients, arguments
        self._slack = slack
        # Computed, so that these buffers belong to XLA and donating them is no copy.
        self._state = jax.jit(lambda p: (p, optimizer.init(p)))(params)
        self._alone = jax.jit(gradients)
        self._loss: Any = None

        def stepped(updates: Tree, params: Tree, moments: Tree) -> Tree:
            updates, moments = optimizer.update(updates, moments, params)
            return optax.apply_updates(params, updates), moments

        self._stepped = stepped

    def contender(self, clip: Any, factors: Factors | None = None) -> Contender:
        """Build the step after a clipping transformation.

        `factors` are the expected ones; without them the result is not checked, which
        takes seconds for a large model.
        """
        own = jax.jit(clip.init)(self._state[0])

        def step(state: Any, own: Any, *arguments: Any) -> Any:
            updates = self._gradients(state[0], *arguments)
            # A loss, as training loops return and keep. On a GPU, XLA updates its graph of
            # launches when a result has a new address, which takes a millisecond for 300
            # kernels: a contender that returns nothing new would seem that much faster.
            loss = jax.tree.leaves(state[0])[0].ravel()[0].astype(jnp.float32)
            updates, own = clip.update(updates, own, state[0])
            return self._stepped(updates, *state), own, loss

        run, facts = compiled(step, self._state, own, *self._arguments, donate=(0, 1))

        def call() -> None:
            nonlocal own
            self._state, own, self._loss = jax.block_until_ready(
                run(self._state, own, *self._arguments)
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
        """A sample of the next state, from gradients that NumPy clips in float64."""
        params = jax.tree.leaves(jax.device_get(self._state[0]))
        found = jax.device_get(self._alone(self._state[0], *self._arguments))
        gradients, structure = jax.tree.flatten(found)
        by = factors(gradients, params)
        clipped = [
            (x.astype(np.float64) * factor).astype(x.dtype)
            for x, factor in zip(gradients, by, strict=True)
        ]
        step = jax.jit(self._stepped)
        return _sampled(step(structure.unflatten(clipped), *self._state))


def _sampled(state: Tree) -> Arrays:
    leaves = map(np.asarray, jax.tree.leaves(state))
    return [x.reshape(-1)[places(x.size)] for x in leaves]


def _error(got: np.ndarray, want: np.ndarray, slack: float) -> float:
    """The largest error over the largest number, beyond what rounding explains."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return 0.0
    allowed = max(ROUNDINGS * float(jnp.finfo(want.dtype).eps), slack)
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
    return float(np.maximum(0.0, error - allowed))
