"""Hold the transformation of one Keras optimizer, with the variables of its state."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._arrays import _packed_state
from .._arrays._types import PyTree
from .._transforms import noting_engines
from .._typing import ConstrainState, SkipState
from ._learned import Description, described


class HeldClip:
    """Hold a transformation outside of the attributes that Keras tracks.

    Gradients and parameters are passed by the path of their variable, in the order of
    the model: sorted names would exchange layers that another process numbers
    differently, such as `dense_9` and `dense_10`.

    Attributes:
      transformation: The clipping transformation.
      key: Its name in the configuration of the optimizer and of its copies.
      variables: The variables of the state, one per leaf, in the order of the model.
      pending: The variables whose gradients Keras will pass to `clip`.
      learned: What the thresholds learn from.
      steps: The optimizer's count after its last step that was not traced.
    """

    def __init__(
        self, transformation: optax.GradientTransformationExtraArgs, key: str
    ) -> None:
        self.transformation = transformation
        self.key = key
        self.variables: list[Any] = []
        self.pending: list[str] | None = None
        self.learned: Description = []
        self.steps: jax.Array | int = 0
        self._built_with: list[Any] = []
        self._clipped: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._treedef: Any = None
        self._order: list[int] = []

    def init(self, variables: Sequence[Any]) -> PyTree:
        """Return the first state for these variables, or raise."""
        self._built_with = list(variables)
        # Keras assigns these gradients to their variables, without a step.
        overwritten = "overwrite_with_gradient"
        clipped = [v for v in variables if not getattr(v, overwritten, False)]
        names = _unique([v.path for v in clipped])
        self._clipped = dict(zip(names, clipped, strict=True))
        self._names = {id(v): name for name, v in self._clipped.items()}
        with noting_engines() as noted:
            state = self.transformation.init(self._params())
        check_clip(self.transformation, state, self._params())
        self._treedef = jax.tree.structure(state)
        self._order = in_model_order(state, names)
        self.learned = described(noted, names)
        return state

    def build(self, optimizer: Any, state: PyTree) -> None:
        """Create the variables of the state."""
        leaves = jax.tree.leaves(state)
        for i in self._order:
            leaf = jnp.asarray(leaves[i])
            self.variables.append(
                optimizer.add_variable(
                    leaf.shape,
                    initializer=lambda shape, dtype, leaf=leaf: leaf,
                    dtype=leaf.dtype.name,
                    name=f"clip_{i}",
                )
            )

    def expect(self, grads: Iterable[Any], variables: Iterable[Any] | None) -> None:
        """Note the variables of the gradients that the next `clip` receives."""
        variables = self._built_with if variables is None else variables
        # Keras raises if the lengths differ.
        pairs = zip(grads, variables, strict=False)
        names = [self._names.get(id(v)) for g, v in pairs if g is not None]
        self.pending = [name for name in names if name]

    def clip(self, grads: Sequence[Any]) -> list[Any]:
        """Return the clipped gradients, and store the new state."""
        names, self.pending = self.pending or [], None
        params = self._params()
        # As in JAX, the gradient of an unused variable is zero.
        updates = jax.tree.map(jnp.zeros_like, params)
        updates |= dict(zip(names, grads, strict=True))
        result: tuple[Any, Any] = self.transformation.update(
            updates, self.state(self.leaves()), params
        )
        updates, leaves = result[0], jax.tree.leaves(result[1])
        for i, variable in zip(self._order, self.variables, strict=True):
            variable.assign(leaves[i])
        return [updates[name] for name in names]

    def count(self, iterations: Any) -> None:
        """Store the optimizer's count of steps, unless the step is traced."""
        count = jnp.copy(iterations)
        if not isinstance(count, Tracer):
            self.steps = count

    def leaves(self) -> list[Any]:
        """Return the leaves of the state; none while `fit` keeps them elsewhere."""
        pairs = zip(self._order, self.variables, strict=True)
        try:
            return [v.value for _, v in sorted(pairs, key=lambda pair: pair[0])]
        except TypeError:
            # Keras calls the initializer of a variable without a value, here None.
            return []

    def state(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(self._treedef, leaves)

    def _params(self) -> collections.OrderedDict[str, Any]:
        return collections.OrderedDict(
            (name, v.value) for name, v in self._clipped.items()
        )


def _unique(paths: list[str]) -> list[str]:
    """Return the paths, with a number where a layer has two variables of one name."""
    counts: collections.Counter[str] = collections.Counter()
    names: list[str] = []
    for path in paths:
        name = path
        while name in names:
            counts[path] += 1
            name = f"{path}_{counts[path]}"
        names.append(name)
    return names


def in_model_order(state: PyTree, names: Sequence[str]) -> list[int]:
    """Return the positions of the leaves of a state, independent of variable names.

    JAX sorts the keys of a dict. The keys of a record are names of variables, and a
    process that has built other models before numbers its layers differently: `dense_9`
    and `dense_10` there are `dense` and `dense_1` here, in the other order.
    """
    places = {name: i for i, name in enumerate(names)}
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    first: dict[Any, int] = {}
    for i, path in enumerate(paths):
        for end in range(len(path)):
            first.setdefault(path[: end + 1], i)

    def rank(i: int) -> list[int]:
        # Keys that are no variable keep their place.
        ends = [paths[i][: end + 1] for end in range(len(paths[i]))]
        return [places.get(_name(end[-1]), first[end]) for end in ends]

    return sorted(range(len(paths)), key=rank)


def _name(key: Any) -> str:
    return _packed_state.as_name(str(getattr(key, "key", "")))


_SKIPS = (
    "a transformation that does not skip steps",
    "The Keras optimizer would move the parameters by its moments in a skipped step."
    ' Pass the clipping inside with nonfinite="zero", or use `skip` with an optax'
    " optimizer in a custom training loop.",
)
_LIMITS = (
    "a transformation that does not limit parameters",
    "Pass only the clipping of gradients, and layers a `kernel_constraint` such as"
    " keras.constraints.MaxNorm.",
)
_WRONG = {
    SkipState: _SKIPS,
    optax.ApplyIfFiniteState: _SKIPS,
    ConstrainState: _LIMITS,
}


def check_clip(
    clip: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> None:
    """Raise if `clip`, with this first state, is no transformation that only clips."""
    kinds = tuple(_WRONG)
    for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(part, kinds):
            wanted, advice = _WRONG[type(part)]
            raise ValueError(
                f"`clip` must be {wanted}, got {type(part).__name__}. {advice}"
            )
    if _negates(clip, state, params):
        raise ValueError(
            "`clip` must be a transformation that does not negate the gradients, got"
            " one that does, as optax optimizers do. The Keras optimizer negates them"
            " too, so the loss would grow. Pass only the clipping, such as"
            " optclip.clip_by_global_norm(1.0), without optax.sgd or optax.adam; the"
            " Keras optimizer takes the step."
        )


def _negates(
    clip: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> bool:
    @jax.jit
    def product(state: PyTree, params: PyTree) -> jax.Array:
        # Entries that differ, since some transformations subtract the mean.
        grads = jax.tree.map(
            lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype),
            params,
        )
        opposite = jax.tree.map(jnp.negative, grads)
        # A schedule of learning rates may begin with zero.
        state = clip.update(grads, state, params)[1]
        # The difference of two updates has no noise and no weight decay.
        up, down = (clip.update(g, state, params)[0] for g in (grads, opposite))
        products = jax.tree.map(lambda u, d, g: jnp.sum((u - d) * g), up, down, grads)
        return jnp.sum(jnp.stack(jax.tree.leaves(products)))

    try:
        # Only a scalar is returned, so the updates need not be stored.
        return bool(product(state, params) < 0)
    except Exception:
        # An error of `clip` itself is raised by the first step too, and Keras may build
        # with abstract arrays, on which nothing can be compared.
        return False
