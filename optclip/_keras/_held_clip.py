"""The transformation of one Keras optimizer, with the variables of its state."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _packed_state
from .._arrays._types import PyTree
from ._check_clip import check_clip


class HeldClip:
    """Hold a transformation outside of the attributes that Keras tracks.

    Gradients and parameters are passed by the path of their variable, in the order of
    the model: sorted names would exchange layers that another process numbers
    differently, such as `dense_9` and `dense_10`.

    Attributes:
      transformation: The clipping transformation.
      entries: The fields and shape of each array of the state; None before `init`.
      saved: The `entries` of the saved state that the optimizer will load, or None.
      variables: The variables of the state, one per leaf, in the order of the model.
      pending: The variables whose gradients Keras will pass to `clip`.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformationExtraArgs,
        saved: list[str] | None = None,
    ) -> None:
        self.transformation = transformation
        self.entries: list[str] | None = None
        self.saved: list[str] | None = saved
        self.variables: list[Any] = []
        self.pending: list[str] | None = None
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
        state = self.transformation.init(self._params())
        check_clip(self.transformation, state, self._params())
        self._treedef = jax.tree.structure(state)
        self._order = in_model_order(state, names)
        self.entries = _entries(state, self._order)
        self._check_saved()
        return state

    def build(self, optimizer: Any, state: PyTree) -> None:
        """Create the variables of the state."""
        leaves = jax.tree.leaves(state)
        for i in self._order:
            leaf = jnp.asarray(leaves[i])
            variable = optimizer.add_variable(
                leaf.shape,
                initializer=functools.partial(_constant, leaf),
                dtype=leaf.dtype.name,
                name=f"clip_{i}",
            )
            self.variables.append(variable)

    def expect(self, grads: Iterable[Any], variables: Iterable[Any] | None) -> None:
        """Note the variables of the gradients that the next `clip` receives."""
        variables = self._built_with if variables is None else variables
        # Keras raises if the lengths differ.
        both = zip(grads, variables, strict=False)
        pairs = [(g, self._names.get(id(v))) for g, v in both]
        self.pending = [name for g, name in pairs if g is not None and name]

    def clip(self, grads: Sequence[Any]) -> list[Any]:
        """Return the clipped gradients, and store the new state."""
        names, self.pending = self.pending or [], None
        params = self._params()
        # As in JAX, the gradient of an unused variable is zero.
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates = zeros | dict(zip(names, grads, strict=True))
        result: tuple[Any, Any]
        result = self.transformation.update(updates, self.state(), params)
        updates, leaves = result[0], jax.tree.leaves(result[1])
        for i, variable in zip(self._order, self.variables, strict=True):
            variable.assign(leaves[i])
        return [updates[name] for name in names]

    def state(self) -> PyTree:
        pairs = zip(self._order, self.variables, strict=True)
        leaves = [v.value for _, v in sorted(pairs, key=lambda pair: pair[0])]
        return jax.tree.unflatten(self._treedef, leaves)

    def _params(self) -> collections.OrderedDict[str, Any]:
        pairs = [(name, v.value) for name, v in self._clipped.items()]
        return collections.OrderedDict(pairs)

    def _check_saved(self) -> None:
        if self.saved is None or self.saved == self.entries:
            return
        both = self.saved, self.entries or []
        pairs = itertools.zip_longest(*both, fillvalue="nothing more")
        saved, made = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"`clip` must be as saved: the saved state has {saved!r} where the state of"
            f" `clip` has {made!r}. Build it with the same arguments; only fixed"
            " thresholds may differ."
        )


def _entries(state: PyTree, order: list[int]) -> list[str]:
    # Without the names of variables, which another process may number differently.
    texts = []
    for path, leaf in jax.tree.leaves_with_path(state):
        fields = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
        texts.append(f"{'.'.join(fields)} {list(jnp.shape(leaf))}")
    return [texts[i] for i in order]


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


def _constant(value: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    del shape, dtype
    return value


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
