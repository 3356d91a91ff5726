"""Scope norms to labeled groups of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from .._arrays import _leaves, _prefix, _validate
from .._arrays._types import Labels, LeafLike, PyTree
from .._norms import Block
from ._scope import Scope


@dataclasses.dataclass(frozen=True)
class Groups(Scope):
    """Measure one norm per label. Use `groups(...)`."""

    labels: PyTree
    # The labels of thresholds. Where `optax.masked` hides leaves from a function of the
    # tree, these labels have no leaf, and their norm is 0.
    declared: tuple[str, ...] = ()
    itemized = True

    def __hash__(self) -> int:
        leaves, treedef = jax.tree.flatten(self.labels)
        return hash((tuple(leaves), treedef, self.declared))

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
        labels = jax.tree.leaves(described)
        is_missed = callable(self.labels) and not labels
        is_hidden = _prefix.has_masked_nodes(tree)
        if is_missed and not is_hidden and _leaves.flatten(tree).leaves:
            raise ValueError(
                "The function passed as `groups` labels no leaf, so that nothing would"
                " be clipped. Return a label, such as 'body', for at least one leaf."
            )
        return described

    def _label_by_leaf(self, described: PyTree, tree: PyTree) -> list[str | None]:
        spread = _prefix.spread_prefix("groups", described, tree, is_leaf=_is_none)
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
    if labels is None:
        wanted = "a tree of strings, or a function of the tree (see optclip.by_path)"
        advice = "Inside such a tree, None means no group."
        raise TypeError(_validate.must_be("groups", wanted, labels, advice))
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
        if not isinstance(label, str):
            subject, wanted = "A label in `groups`", "a string, or None for no group"
            advice = "Pass a tree of labels or a function that returns one."
            advice = f"{advice} {_validate.static('groups', label)}"
            raise TypeError(_validate.must_be(subject, wanted, label, advice))
    return labels


def _is_none(x: Any) -> bool:
    return x is None
