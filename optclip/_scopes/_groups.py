"""Scope norms to labeled groups of leaves, or to the layers of stacks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._arrays import _leaves, _packed_state, _prefix, _validate
from .._arrays._types import Labels, LeafLike, PyTree
from .._norms import Block
from ._scope import Scope


# Hashed by identity, since a tree of labels may have no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Scope):
    """Measure one norm per label. Use `groups(...)`."""

    labels: PyTree
    # The labels of thresholds. Where `optax.masked` hides leaves from a function of the
    # tree, these labels have no leaf, and their norm is 0.
    declared: tuple[str, ...] = ()
    itemized = True

    def labeled(self, tree: PyTree) -> Groups:
        """Return the scope with the labels that a function of the tree returns."""
        are_hidden = callable(self.labels) and _prefix.has_masked_nodes(tree)
        return Groups(self._label_tree(tree), self.declared if are_hidden else ())

    def blocks(self, tree: PyTree) -> PyTree:
        described = self._label_tree(tree)
        labels = [*jax.tree.leaves(described), *self.declared]
        members: dict[str, list[LeafLike]] = {label: [] for label in labels}
        leaves = _leaves.flatten(tree).leaves
        for label, x in zip(self._label_by_leaf(described, tree), leaves, strict=True):
            if label is not None:
                members[label].append(x)
        return {label: Block(leaves) for label, leaves in members.items()}

    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        labels = self._label_by_leaf(self._label_tree(tree), tree)
        return _leaves.flatten(tree).rebuild([values.get(label) for label in labels])

    def _label_tree(self, tree: PyTree) -> PyTree:
        """Return the tree of labels; raise if a function returned none."""
        described = _checked(_prefix.described("groups", self.labels, tree))
        is_missed = callable(self.labels) and not jax.tree.leaves(described)
        is_hidden = _prefix.has_masked_nodes(tree)
        if is_missed and not is_hidden and _leaves.flatten(tree).leaves:
            raise ValueError(
                "The function passed as `groups` labels no leaf, so that nothing would"
                " be clipped. Return a label, such as 'body', for at least one leaf."
            )
        return described

    def _label_by_leaf(self, described: PyTree, tree: PyTree) -> list[str | None]:
        spread = _prefix.spread_prefix(
            "groups", described, tree, is_leaf=lambda label: label is None
        )
        return _leaves.flatten(tree).treedef.flatten_up_to(spread)


def groups(labels: Labels) -> Groups:
    """Measure one norm per group of leaves.

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

    Args:
      labels: Label of each leaf: a tree of strings, a prefix of one, or a function that
        returns one, such as `optclip.by_path(...)`. Leaves labeled None are unclipped.

    Returns:
      A scope for `clip_by(over=...)`. Its norms are a dict by label.
    """
    _validate.require(
        "groups",
        labels,
        labels is not None,
        "a tree of strings, or a function of the tree (see optclip.by_path)",
        "Inside such a tree, None means no group.",
        TypeError,
    )
    return Groups(labels if callable(labels) else _checked(labels))


def declaring(scope: Scope, threshold: PyTree) -> Scope:
    """Return a scope of groups that also contains the labels of a threshold."""
    if not isinstance(scope, Groups) or not isinstance(threshold, Mapping):
        return scope
    labels = tuple(label for label in threshold if isinstance(label, str))
    return dataclasses.replace(scope, declared=labels)


def _checked(labels: PyTree) -> PyTree:
    """Return a tree of labels; raise if one is not a string."""
    # A plain `tree.map` returns a BCOO of labels where the tree has a BCOO.
    labels = jax.tree.map(
        lambda label: label.data if _leaves.is_sparse(label) else label,
        labels, is_leaf=_leaves.is_sparse,
    )  # fmt: skip
    for label in jax.tree.leaves(labels):
        _validate.kind(
            "A label in `groups`",
            label,
            str,
            "a string, or None for no group",
            "Pass a tree of labels or a function that returns one."
            f" {_validate.static('groups', label)}",
        )
    return labels


@dataclasses.dataclass(frozen=True)
class Layers(Scope):
    """Measure one norm per layer of each stack. Use `layers(...)`."""

    paths: tuple[str, ...]
    axis: int = 0
    each_leaf: bool = False

    def blocks(self, tree: PyTree) -> PyTree:
        leaves, names, _ = _named(tree)
        self._check_paths(names, tree)
        members: dict[str, list[LeafLike]] = {}
        for name, x in zip(names, leaves, strict=True):
            if x is not None:
                members.setdefault(self._block_of(name), []).append(x)
        return {
            key: Block(each, stacked=None if self._stack_of(key) is None else self.axis)
            for key, each in members.items()
        }

    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        leaves, names, treedef = _named(tree)
        return treedef.unflatten(
            None if x is None else values.get(self._block_of(name))
            for name, x in zip(names, leaves, strict=True)
        )

    def _block_of(self, name: str) -> str:
        stack = self._stack_of(name)
        return name if stack is None or self.each_leaf else stack

    def _stack_of(self, name: str) -> str | None:
        """Return the path of the stack that has a leaf, None if no stack has it."""
        return next((path for path in self.paths if _is_below(path, name)), None)

    def _check_paths(self, names: list[str], tree: PyTree) -> None:
        """Raise if a stack has no leaf."""
        if not names or _prefix.has_masked_nodes(tree):
            return
        for path in self.paths:
            if not any(_is_below(path, name) for name in names):
                raise ValueError(
                    f"`layers` must name a path in the updates, got {path!r}; their"
                    f" paths begin with {names[:5]}."
                )


def layers(
    paths: str | Sequence[str], *, axis: int = 0, each_leaf: bool = False
) -> Layers:
    """Measure one norm per layer of models that stack their layers in each array.

    `flax.linen.scan`, `nnx.scan`, `jax.lax.scan` over parameters, MaxText, AXLearn and
    haliax store the parameters of all layers in one array per weight, such as
    `(layers, inputs, outputs)`. Leaves outside of the stacks have one norm each.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.layers("layers"))
      >>> kernel = jnp.array([[0.3, 0.0], [3.0, 0.0], [0.0, 6.0]])
      >>> bias = jnp.array([0.4, 4.0, 8.0])
      >>> grads = {"layers": {"kernel": kernel, "bias": bias}, "head": jnp.ones(4)}
      >>> clipped = tx.update(grads, tx.init(grads))[0]
      >>> print(clipped["layers"]["bias"], clipped["head"])
      [0.4 0.8 0.8] [0.5 0.5 0.5 0.5]

    Args:
      paths: Path of the stack, such as `"params/decoder/layers"`, or a list of paths.
        All leaves below it must have the same number of layers. `""` is the whole tree.
      axis: Axis that counts the layers; 1 in MaxText. Default: 0.
      each_leaf: Whether each leaf of a layer has its own norm. Default: False, one norm
        of all leaves of a layer.

    Returns:
      A scope for `clip_by(over=...)`. Its norms are a dict: by path, an array of shape
      `(layers,)` for each stack (each of its leaves with `each_leaf`) and a number for
      each other leaf. Thresholds may have the same form. `record="leaves"` records one
      entry per layer, such as `clip/norm/layers/2`.
    """
    each = [paths] if isinstance(paths, str) else paths
    wanted = "the path of a stack, such as 'decoder/layers', or a list of paths"
    _validate.kind("paths", each, (list, tuple), wanted)
    for path in each:
        _validate.kind("paths", path, str, wanted)
    is_nested = any(_is_below(*pair) for pair in itertools.permutations(each, 2))
    wanted = "one or more paths, none below another"
    _validate.require("paths", paths, bool(each) and not is_nested, wanted)
    return Layers(
        tuple(each),
        _validate.whole("axis", axis, "an int", _validate.static("axis", axis)),
        _validate.flag("each_leaf", each_leaf),
    )


def _is_below(path: str, name: str) -> bool:
    return path in ("", name) or name.startswith(f"{path}/")


def _named(tree: PyTree) -> tuple[list[Any], list[str], Any]:
    """Return the leaves of a tree and None for excluded ones, with unique paths."""
    pairs, treedef = jax.tree.flatten_with_path(
        tree, is_leaf=lambda x: x is None or _leaves.is_sparse(x)
    )
    names = _packed_state.unique_names([path for path, _ in pairs])
    return [x for _, x in pairs], names, treedef
