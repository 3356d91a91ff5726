"""Optimizer steps that share their parameters and moments, donated, as in training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import exact
from benchmarks.donated import compiled
from benchmarks.exact import Arrays, Factors, places
from benchmarks.timing import Contender

Tree = Any
Gradients = Callable[..., Tree]  # from the parameters and the arguments of the step

LEAVES, ELEMENTS = 8, 1 << 12  # looked at after a step
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
        self._optimizer = optimizer
        self._gradients, self._arguments = gradients, arguments
        self._slack = slack
        # Computed, so that these buffers belong to XLA and donating them is no copy.
        self._state = jax.jit(lambda p: (p, optimizer.init(p)))(params)
        self._sampled = jax.jit(_sampler(params))
        self._alone = jax.jit(gradients)

    def contender(self, clip: Any, factors: Factors) -> Contender:
        """The step behind a clip, whose factors are known."""
        own = jax.jit(clip.init)(self._state[0])

        def step(state: Any, own: Any, *arguments: Any) -> Any:
            params, moments = state
            updates = self._gradients(params, *arguments)
            updates, own = clip.update(updates, own, params)
            return _stepped(self._optimizer, updates, moments, params), own

        run, facts = compiled(step, self._state, own, *self._arguments, donate=(0, 1))
        facts["clip's state kB"] = _nbytes(own) / 1e3

        def call() -> None:
            nonlocal own
            self._state, own = jax.block_until_ready(
                run(self._state, own, *self._arguments)
            )

        expected: list[Any] = []

        def prepare() -> None:
            if not expected:
                expected.append(jax.device_get(self._expected(factors)))

        def error(_: Any) -> float:
            found = jax.device_get(self._sampled(self._state))
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
            return max(_error(*pair, self._slack) for pair in pairs)

        return Contender(call, prepare, error, facts)

    def _expected(self, factors: Factors) -> Tree:
        """A sample of the next state, from gradients that NumPy clips in float64."""
        gradients = jax.device_get(self._alone(self._state[0], *self._arguments))
        arrays: Arrays = jax.tree.leaves(gradients)
        params = jax.tree.leaves(jax.device_get(self._state[0]))
        by = factors(arrays, params)
        chosen = [(arrays[i], by[i]) for i in places(len(arrays), LEAVES)]
        updates = [
            exact.scaled(x, f, places(x.size, ELEMENTS)).astype(x.dtype)
            for x, f in chosen
        ]
        sampled, moments = self._sampled(self._state)
        step = jax.jit(_stepped, static_argnums=0)
        return step(self._optimizer, updates, moments, sampled)


def _stepped(optimizer: Any, updates: Tree, moments: Tree, params: Tree) -> Tree:
    """The parameters and moments after a step."""
    updates, moments = optimizer.update(updates, moments, params)
    return optax.apply_updates(params, updates), moments


def _sampler(params: Tree) -> Callable[[Tree], Tree]:
    """Of each tree like the parameters in a tree, some elements of some leaves.

    An optimizer that goes element by element can step on these alone.
    """
    structure = jax.tree.structure(params)
    chosen = places(structure.num_leaves, LEAVES)

    def is_like_params(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    def sample(node: Any) -> Any:
        if not is_like_params(node):
            return node
        leaves = jax.tree.leaves(node)
        return [leaves[i].reshape(-1)[places(leaves[i].size, ELEMENTS)] for i in chosen]

    return lambda tree: jax.tree.map(sample, tree, is_leaf=is_like_params)


def _error(got: np.ndarray, want: np.ndarray, slack: float) -> float:
    """The largest error over the largest number, beyond what rounding explains."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return 0.0
    allowed = max(ROUNDINGS * float(jnp.finfo(want.dtype).eps), slack)
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
    return float(np.maximum(0.0, error - allowed))


def _nbytes(state: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
