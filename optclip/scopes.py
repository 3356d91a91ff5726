"""OVER WHAT one norm is taken: the tree, each leaf, given axes, groups, each element.

A scope arranges the leaves of a tree into blocks that share a norm, and says which
norm each leaf was in. It does no arithmetic: your own is a class with two methods.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from optclip import _leaves, _trees
from optclip.norms import Block


class Scope(abc.ABC):
    """What shares a norm. Subclass it for your own; make it a frozen dataclass.

    Attributes:
      itemized: whether the record keeps one number for each block (tree and groups)
        rather than the largest of all.

    Example:
      One norm for each top-level key of a dict of layers:

      >>> import dataclasses, jax, jax.numpy as jnp, optclip
      >>> @dataclasses.dataclass(frozen=True)
      ... class Layers(optclip.scopes.Scope):
      ...     def blocks(self, tree):
      ...         block = lambda layer: optclip.norms.Block(jax.tree.leaves(layer))
      ...         return {key: block(layer) for key, layer in tree.items()}
      ...     def spread(self, values, tree):
      ...         fill = lambda key: jax.tree.map(lambda _: values[key], tree[key])
      ...         return {key: fill(key) for key in tree}
      >>> tx = optclip.clip_by(1.0, over=Layers())
      >>> w, b, c = jnp.array([3.0]), jnp.array([4.0]), jnp.array([0.5])
      >>> grads = {"dense": {"w": w, "b": b}, "out": {"c": c}}
      >>> clipped, _ = tx.update(grads, tx.init(grads))
      >>> print(clipped["dense"]["w"], clipped["dense"]["b"], clipped["out"]["c"])
      [0.6] [0.8] [0.5]
    """

    itemized: bool = False

    @abc.abstractmethod
    def blocks(self, tree: Any) -> Any:
        """A pytree of `norms.Block`, which the norms then have the structure of.

        `tree` is what is measured: leaves that enter no norm are None in it.
        """

    @abc.abstractmethod
    def spread(self, values: Any, tree: Any) -> Any:
        """A tree like `tree`, each leaf the value of its block, or None for none.

        `values` has the structure of `blocks`; `tree` is what is scaled, in which
        leaves that are not scaled are None.
        """


@dataclasses.dataclass(frozen=True)
class Tree(Scope):
    """One norm over all leaves: the global norm. Use the constant `TREE`."""

    itemized = True

    def blocks(self, tree: Any) -> Any:
        return Block(_leaves.flatten(tree).leaves)

    def spread(self, values: Any, tree: Any) -> Any:
        return jax.tree.map(lambda _: values, tree)


@dataclasses.dataclass(frozen=True)
class Leaf(Scope):
    """One norm for each leaf. Use the constant `LEAF`."""

    def blocks(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: Block([x]), tree)

    def spread(self, values: Any, tree: Any) -> Any:
        return _trees.lookup(values, tree)


@dataclasses.dataclass(frozen=True)
class Axes(Scope):
    """One norm for each slice of each leaf along the given axes. Use `axes(...)`."""

    axis: tuple[int, ...]

    def blocks(self, tree: Any) -> Any:
        flat = _leaves.flatten(tree)
        return flat.rebuild(
            [
                Block([x], _counted_from_zero(self.axis, x, path))
                for path, x in zip(flat.paths, flat.leaves, strict=True)
            ]
        )

    def spread(self, values: Any, tree: Any) -> Any:
        return _trees.lookup(values, tree)


@dataclasses.dataclass(frozen=True)
class Element(Scope):
    """Each element by its own modulus. Use the constant `ELEMENT`."""

    def blocks(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: Block([x], ()), tree)

    def spread(self, values: Any, tree: Any) -> Any:
        return _trees.lookup(values, tree)


@dataclasses.dataclass(frozen=True)
class Groups(Scope):
    """One norm for each label. Use `groups(...)`."""

    labels: Any
    itemized = True

    def blocks(self, tree: Any) -> Any:
        described = self._described(tree)
        members: dict[str, list[Any]] = {
            label: [] for label in jax.tree.leaves(described)
        }
        leaves = _leaves.flatten(tree).leaves
        for label, x in zip(self._labels(described, tree), leaves, strict=True):
            if label is not None:
                members[label].append(x)
        return {label: Block(leaves) for label, leaves in members.items()}

    def spread(self, values: Any, tree: Any) -> Any:
        labels = self._labels(self._described(tree), tree)
        return _leaves.flatten(tree).rebuild([values.get(label) for label in labels])

    def _described(self, tree: Any) -> Any:
        described = _trees.described("groups", self.labels, tree)
        for label in jax.tree.leaves(described):
            if not isinstance(label, str):
                raise TypeError(
                    f"groups holds the label {label!r} ({type(label).__name__}); a"
                    " label is a string, or None for leaves in no group. Give a tree of"
                    " these or a function that returns one; under"
                    " optax.inject_hyperparams name it in static_args=('groups',)."
                )
        return described

    def _labels(self, described: Any, tree: Any) -> list[Any]:
        spread = _trees.spread_prefix("groups", described, tree, is_leaf=_is_none)
        return _leaves.flatten(tree).treedef.flatten_up_to(spread)


__all__ = ["ELEMENT", "LEAF", "TREE", "Scope", "axes", "groups"]

TREE: Tree = Tree()
LEAF: Leaf = Leaf()
ELEMENT: Element = Element()


def blocks_of(scope: Scope, tree: Any) -> tuple[list[Block], Any]:
    """The blocks of a scope and their structure, those of a user's own checked."""
    blocks, treedef = jax.tree.flatten(scope.blocks(tree))
    for block in blocks:
        if not isinstance(block, Block):
            raise TypeError(
                f"over={scope!r}: blocks(tree) returned {block!r}"
                f" ({type(block).__name__}). Return a pytree of optclip.norms.Block."
            )
    return blocks, treedef


def owners_of(scope: Scope, values: Any, tree: Any, treedef: Any) -> list[Any]:
    """The value of its block for each leaf, None for leaves that `tree` has not."""
    found = scope.spread(values, tree)
    try:
        owners = treedef.flatten_up_to(found)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"over={scope!r}: spread(values, tree) returned the structure"
            f" {jax.tree.structure(found)}, not the {treedef} of the updates. Return a"
            " tree like them, each leaf the value of its block, or None."
        ) from error
    if any(not (owner is None or isinstance(owner, int)) for owner in owners):
        raise ValueError(
            f"over={scope!r}: spread(values, tree) returned {found!r}. Return a tree"
            " like the updates, each leaf one of the values, as given, or None."
        )
    return owners


def axes(axis: int | tuple[int, ...]) -> Axes:
    """The scope of one norm for each slice of each leaf along `axis`.

    Args:
      axis: the axes that a norm is taken over; negative ones count from the end. Every
        leaf must have them. `axes(0)` gives a `(fan_in, units)` kernel one norm a unit.

    Returns:
      A scope for `clip_by(over=...)`; its norms have the leaf's shape with 1 at `axis`.

    Raises:
      TypeError: `axis` is no int or tuple of ints.
      ValueError: at `init` and `update`, a leaf lacks it.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0))
      >>> kernel = jnp.array([[3.0, 0.1], [4.0, 0.2]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.6 0.1]
       [0.8 0.2]]
    """
    given = axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(a, int) and not isinstance(a, bool) for a in given):
        raise TypeError(
            f"axis={axis!r} is no int or tuple of ints. Give one, negative ones counted"
            " from the end; under optax.inject_hyperparams give a tuple or name it in"
            " static_args=('axis',)."
        )
    return Axes(given)


def groups(labels: Any | Callable[[Any], Any]) -> Groups:
    """The scope of one norm for each label.

    Args:
      labels: a tree of strings with the structure of the updates or a prefix of it, or
        a function from the tree to such a tree (see `by_path`). None marks leaves that
        are in no group and are left untouched.

    Returns:
      A scope for `clip_by(over=...)`; its norms are a dict by label.

    Raises:
      TypeError: `labels` is None; at `init` and `update`, a label is no string.
      ValueError: at `init` and `update`, the labels are no prefix of the updates.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> labels = {"w": "body", "b": "body", "out": None}
      >>> tx = optclip.clip_by(1.0, over=optclip.groups(labels))
      >>> w, b, out = jnp.array([3.0]), jnp.array([4.0]), jnp.array([9.0])
      >>> grads = {"w": w, "b": b, "out": out}
      >>> clipped, _ = tx.update(grads, tx.init(grads))
      >>> print(clipped["w"], clipped["b"], clipped["out"])
      [0.6] [0.8] [9.]
    """
    if labels is None:
        raise TypeError(
            "groups=None puts no leaf in a group. Give a tree of strings, in which None"
            " stands for no group, or a function of the tree (see optclip.by_path)."
        )
    return Groups(labels)


def _is_none(x: Any) -> bool:
    return x is None


def _counted_from_zero(axis: tuple[int, ...], x: Any, path: Any) -> tuple[int, ...]:
    if any(not -x.ndim <= a < x.ndim for a in axis):
        raise ValueError(
            f"axis={axis} is out of range for the leaf '{_leaves.path_str(path)}' of"
            f" shape {x.shape}. Leave such leaves out with clip_mask=, or clip them by"
            " another transformation under optax.masked."
        )
    found = tuple(sorted(a % x.ndim for a in axis))
    if len(set(found)) < len(found):
        raise ValueError(
            f"axis={axis} names an axis of the leaf '{_leaves.path_str(path)}' of shape"
            f" {x.shape} twice. Give each axis once."
        )
    return found
