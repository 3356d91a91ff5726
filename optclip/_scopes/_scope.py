"""Define scopes, and the basic ones: the tree, each leaf, each element."""

from __future__ import annotations

import abc
import dataclasses
from types import FunctionType
from typing import Literal

import jax

from .._arrays import _leaves, _prefix, _validate
from .._arrays._types import KeyPath, LeafLike, PyTree, TreeDef
from .._norms import Block


class Scope(abc.ABC):
    """Choose which elements share a norm. Subclass it as a frozen dataclass.

    Attributes:
      itemized: Whether the record has one entry per block, as for the tree and groups,
        instead of the largest norm.

    Example:
      One norm per top-level key of a dict of layers:

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
    def blocks(self, tree: PyTree) -> PyTree:
        """Return a pytree of `norms.Block`, whose structure the norms share.

        In `tree`, leaves that enter no norm are None; others are arrays, or objects
        with the same `shape`, `ndim`, `size` and `dtype`.
        """

    @abc.abstractmethod
    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        """Return a tree like `tree` with the value of its block at each leaf, or None.

        `values` has the structure of `blocks`. In `tree`, leaves that are not scaled
        are None.
        """


@dataclasses.dataclass(frozen=True)
class Tree(Scope):
    """Measure one norm of all leaves: the global norm, `over="tree"`."""

    itemized = True

    def blocks(self, tree: PyTree) -> PyTree:
        return Block(_leaves.flatten(tree).leaves)

    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: values, tree)


class PerLeaf(Scope):
    """Build blocks from single leaves, or from slices of one leaf."""

    @abc.abstractmethod
    def block(self, path: KeyPath, leaf: LeafLike) -> Block | None:
        """Return the block of a leaf; None if it is unclipped."""

    def blocks(self, tree: PyTree) -> PyTree:
        return jax.tree.map_with_path(self.block, tree)

    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        return _prefix.lookup(values, tree)


@dataclasses.dataclass(frozen=True)
class EachLeaf(PerLeaf):
    """Measure one norm per leaf, `over="leaf"`."""

    def block(self, path: KeyPath, leaf: LeafLike) -> Block:
        return Block([leaf])


@dataclasses.dataclass(frozen=True)
class EachElement(PerLeaf):
    """Measure the modulus of each element, `over="element"`."""

    def block(self, path: KeyPath, leaf: LeafLike) -> Block:
        return Block([leaf], ())


TREE: Tree = Tree()
LEAF: EachLeaf = EachLeaf()
ELEMENT: EachElement = EachElement()

_BY_NAME = {"tree": TREE, "leaf": LEAF, "element": ELEMENT}
ScopeLike = Scope | Literal["tree", "leaf", "element"]


def as_scope(over: ScopeLike) -> Scope:
    """Return the scope of an `over=` argument."""
    if isinstance(over, Scope):
        return over
    if isinstance(over, str) and over in _BY_NAME:
        return _BY_NAME[over]
    wanted = (
        "'tree', 'leaf', 'element', optclip.axes(...), units(...), groups(...),"
        " layers(...) or an instance of a subclass of optclip.scopes.Scope"
    )
    advice = _validate.static("over", over)
    if isinstance(over, FunctionType):
        advice = f"Call the function and pass its result, {over.__name__}(...)."
    raise TypeError(_validate.must_be("over", wanted, over, advice))


def blocks_of(scope: Scope, tree: PyTree) -> tuple[list[Block], TreeDef]:
    """Return the blocks of a scope and their structure; check custom scopes."""
    blocks, treedef = jax.tree.flatten(scope.blocks(tree))
    for block in blocks:
        if not isinstance(block, Block):
            subject = f"over={scope!r}: the result of blocks(tree)"
            wanted = "a pytree of optclip.norms.Block"
            raise TypeError(_validate.must_be(subject, wanted, block))
    return blocks, treedef


def owners_of(
    scope: Scope, values: PyTree, tree: PyTree, treedef: TreeDef
) -> list[int | None]:
    """Return the index of the block of each leaf; None for leaves missing in `tree`."""
    spread_tree = scope.spread(values, tree)
    try:
        owners = treedef.flatten_up_to(spread_tree)
    except (ValueError, TypeError) as error:
        got = f"the structure {jax.tree.structure(spread_tree)}, not {treedef}"
        raise ValueError(_not_spread(scope, got)) from error
    if any(not (owner is None or isinstance(owner, int)) for owner in owners):
        raise ValueError(_not_spread(scope, repr(spread_tree)))
    return owners


def _not_spread(scope: Scope, got: str) -> str:
    return (
        f"over={scope!r}: spread(values, tree) must return a tree like the updates,"
        f" each leaf an unchanged entry of values or None, got {got}."
    )
