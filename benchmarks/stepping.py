"""Optimizer steps that share their parameters and moments, donated, as in training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import trees
from benchmarks.contenders import plain_scale
from benchmarks.held import compiled
from benchmarks.oracle import judged, places
from benchmarks.timing import Contender

Tree = Any
Gradients = Callable[..., Tree]  # from the parameters and the arguments of the step

LEAVES, ELEMENTS = 8, 1 << 12  # looked at after a step
ROUNDINGS = 8  # of the dtype, by which two orders of the same arithmetic may differ


class Clip(NamedTuple):
    """A clip of a step, and the threshold that it must have kept to."""

    transformation: Any
    limit: float


class Shared:
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

    def contender(self, name: str, clip: Clip | None) -> Contender:
        """The step by clip, or unclipped."""
        tx = None if clip is None else clip.transformation
        own = None if tx is None else jax.jit(tx.init)(self._state[0])

        def step(state: Any, own: Any, *arguments: Any) -> Any:
            params, moments = state
            updates = self._gradients(params, *arguments)
            if tx is not None:
                updates, own = tx.update(updates, own, params)
            return _stepped(self._optimizer, updates, moments, params), own

        run, facts = compiled(step, self._state, own, *self._arguments, donate=(0, 1))

        def call() -> None:
            nonlocal own
            self._state, own = jax.block_until_ready(
                run(self._state, own, *self._arguments)
            )

        if clip is None:
            return Contender(call, facts=facts)
        prepare, inspect = self._check(name, clip.limit)
        return Contender(call, prepare, inspect, facts)

    def _check(self, name: str, limit: float) -> tuple[Callable[[], None], Any]:
        """What to note before the first step, and to hold its result against."""
        expected: list[Any] = []

        def prepare() -> None:
            if not expected:
                expected.append(jax.device_get(self._expected(limit)))

        def inspect(_: Any) -> dict[str, Any]:
            found = jax.device_get(self._sampled(self._state))
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
            errors = [_error(*pair, slack=self._slack) for pair in pairs]
            worst = max(errors, key=lambda each: each[1])
            judged(name, worst[1], 1.0)
            return {"error": worst[0]}

        return prepare, inspect

    def _expected(self, limit: float) -> Tree:
        """A sample of the next state, from gradients that NumPy clips in float64."""
        gradients = self._alone(self._state[0], *self._arguments)
        norm = trees.exact_norm(jax.tree.leaves(gradients))
        (params, moments), updates = self._sampled((self._state, gradients))
        updates = [
            (np.asarray(x, np.float64) * min(1.0, limit / norm)).astype(x.dtype)
            for x in updates
        ]
        return jax.jit(_stepped, static_argnums=0)(
            self._optimizer, updates, moments, params
        )


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

    def alike(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    def sample(node: Any) -> Any:
        if not alike(node):
            return node
        leaves = jax.tree.leaves(node)
        return [leaves[i].reshape(-1)[places(leaves[i].size, ELEMENTS)] for i in chosen]

    return lambda tree: jax.tree.map(sample, tree, is_leaf=alike)


def _error(got: np.ndarray, want: np.ndarray, slack: float) -> tuple[float, float]:
    """The largest error relative to the largest number, and over what is allowed."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return 0.0, 0.0
    eps = float(jnp.finfo(want.dtype).eps)
    got, want = got.astype(np.float64), want.astype(np.float64)
    # Where the optimizer itself overflows, in float16, it does so clipped or not.
    counted = np.isfinite(want)
    got, want = np.where(counted, got, 0), np.where(counted, want, 0)
    if not np.all(np.isfinite(got)):
        return np.inf, np.inf
    error = float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))
    return error, error / max(ROUNDINGS * eps, slack)


def transformations(limit: float) -> dict[str, Clip | None]:
    """The clips of a step, as one would put them in `optax.chain`."""
    clips = {
        "optclip": optclip.clip_by_global_norm(limit),
        "optclip, silent": optclip.clip_by_global_norm(limit, record=False),
        "optax": optax.clip_by_global_norm(limit),
    }
    return {"unclipped": None, **{name: Clip(tx, limit) for name, tx in clips.items()}}


def least(limit: float) -> Clip:
    """Our norm and a plain scale, with nothing that makes the clip exact or safe."""

    def update(updates: Tree, params: Tree) -> Tree:
        del params
        norm = optclip.functional.global_norm(updates)
        # Or XLA on CPU would keep in float32 what both read.
        again = jax.lax.optimization_barrier(updates)
        return plain_scale(again, jnp.minimum(1.0, limit / norm))

    return Clip(optax.stateless(update), limit)
