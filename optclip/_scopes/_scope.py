"""Define scopes, and those without labels: the tree, each leaf, slices, elements."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

import jax
import numpy as np

from .._arrays import _leaves, _prefix, _validate
from .._arrays._leaf import counted_from_zero
from .._arrays._types import KeyPath, LeafLike, PyTree, TreeDef
from .._norms import Block


class Scope(abc.ABC):
    """Choose which elements share a norm. Subclass it as a frozen dataclass.

    States of rules that learn contain the name of the class and its numeric fields, so
    that a state of another scope is rejected.

    Attributes:
      itemized: Whether the record has one entry per block, as for the tree and groups,
        instead of the largest norm.

    Example:
      One norm per top-level key of a dict of layers:

      >>> import dataclasses, jax, jax.numpy as jnp, optclip
      >>> @dataclasses.dataclass(frozen=True)
      ... class TopLevel(optclip.scopes.Scope):
      ...     def blocks(self, tree):
      ...         block = lambda layer: optclip.norms.Block(jax.tree.leaves(layer))
      ...         return {key: block(layer) for key, layer in tree.items()}
      ...     def spread(self, values, tree):
      ...         fill = lambda key: jax.tree.map(lambda _: values[key], tree[key])
      ...         return {key: fill(key) for key in tree}
      >>> tx = optclip.clip_by(1.0, over=TopLevel())
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
        with the same `shape`, `ndim`, `size` and `dtype`. A leaf enters the norm of
        each block that it is in, which may be none or several.
        """

    @abc.abstractmethod
    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        """Return a tree like `tree` with the value of its block at each leaf, or None.

        `values` has the structure of `blocks`. In `tree`, leaves that are not scaled
        are None. A leaf may have the value of a block that it is not in.
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
"""The scope of a norm, which is `"tree"`, `"leaf"`, `"element"` or a `Scope`."""


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
            raise TypeError(
                _validate.must_be(
                    f"over={scope!r}: the result of blocks(tree)",
                    "a pytree of optclip.norms.Block",
                    block,
                )
            )
    return blocks, treedef


def owners_of(
    scope: Scope, values: PyTree, tree: PyTree, treedef: TreeDef
) -> list[int | None]:
    """Return the index of the block of each leaf; None for leaves missing in `tree`."""
    spread_tree = scope.spread(values, tree)
    try:
        owners = treedef.flatten_up_to(spread_tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            _not_spread(
                scope, f"the structure {jax.tree.structure(spread_tree)}, not {treedef}"
            )
        ) from error
    if any(not (owner is None or isinstance(owner, int)) for owner in owners):
        raise ValueError(_not_spread(scope, repr(spread_tree)))
    return owners


def _not_spread(scope: Scope, got: str) -> str:
    return (
        f"over={scope!r}: spread(values, tree) must return a tree like the updates,"
        f" each leaf an unchanged entry of values or None, got {got}."
    )


# Returns the axes of the norms from the path and shape of a leaf; None for the default.
AxesByLeaf = Callable[[str, tuple[int, ...]], int | tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class Axes(PerLeaf):
    """Measure one norm per slice of each leaf along given axes. Use `axes(...)`."""

    axis: tuple[int, ...]

    def block(self, path: KeyPath, leaf: LeafLike) -> Block:
        return Block([leaf], counted_from_zero(self.axis, leaf, path))


@dataclasses.dataclass(frozen=True)
class Units(Scope):
    """Measure one norm per unit of each leaf. Use `units(...)`."""

    stacked: Callable[[str], bool] | None = None
    axis: AxesByLeaf | None = None

    def blocks(self, tree: PyTree) -> PyTree:
        flat = _leaves.flatten(tree)
        names = _leaves.names_of(flat.paths)
        return flat.rebuild(
            [
                Block([x], counted_from_zero(self._axis(name, x), x, path))
                for name, path, x in zip(names, flat.paths, flat.leaves, strict=True)
            ]
        )

    def spread(self, values: PyTree, tree: PyTree) -> PyTree:
        return _prefix.lookup(values, tree)

    def _axis(self, name: str, x: LeafLike) -> tuple[int, ...]:
        # A Python number has no shape.
        shape = getattr(x, "shape", ())
        if self.axis is not None:
            leaf_axis = self.axis(name, shape)
            if leaf_axis is not None:
                return _as_tuple(leaf_axis)
        first = int(bool(self.stacked is not None and self.stacked(name)))
        has_outputs = len(shape) - first >= 2
        return tuple(range(first, len(shape) - has_outputs))


def axes(axis: int | tuple[int, ...]) -> Axes:
    """Measure one norm per slice of each leaf along `axis`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0))
      >>> kernel = jnp.array([[3.0, 0.1], [4.0, 0.2]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.6 0.1]
       [0.8 0.2]]

    Args:
      axis: Axes that each norm covers, an int or tuple of ints; every leaf must have
        them. `axes(0)` measures one norm per unit of a kernel `(fan_in, units)`.

    Returns:
      A scope for `clip_by(over=...)`. Its norms have the shape of the leaf with 1 at
      `axis`.
    """
    return Axes(_as_tuple(axis))


def units(
    *,
    stacked: Callable[[str], bool] | None = None,
    axis: AxesByLeaf | None = None,
) -> Units:
    """Measure one norm per unit: all weights that feed one output of a layer.

    Each norm covers all axes but the last, which holds the outputs in Flax, Haiku and
    Keras. Leaves of rank 0 and 1 are one unit.

    Warning:
      In Equinox, haliax and PyTorch outputs are on the first axis. For linear layers
      pass `axis=lambda path, shape: -1 if len(shape) == 2 else None`; for others return
      the axes of the inputs, such as `(1, 2, 3)` for an Equinox `Conv2d`, or `-1` for
      stacked haliax layers `(layers, outputs, inputs)`.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> scope = optclip.units(stacked=lambda path: path.startswith("layers"))
      >>> layers = {"kernel": jnp.ones((12, 64, 256)), "bias": jnp.ones((12, 256))}
      >>> params = {"layers": layers, "head": jnp.ones((256, 10))}
      >>> print(jax.tree.map(lambda block: block.axis, scope.blocks(params)))
      {'head': (0,), 'layers': {'bias': (1,), 'kernel': (1,)}}

    Args:
      stacked: Function of a leaf's path, such as `"layers/dense/kernel"`, that returns
        whether its first axis counts layers, which then have separate units. Default:
        none.
      axis: Function of a leaf's path and shape that returns the axes of its norms: an
        int, a tuple, or None for the default. Return 0 for attention kernels
        `(inputs, heads, features)`, whose outputs are on two axes.

    Returns:
      A scope for `clip_by(over=...)`. Its norms have the shape of the leaf with 1 at
      the axes that they cover.

    References:
      Brock, De, Smith and Simonyan, "High-Performance Large-Scale Image Recognition
      Without Normalization", 2021, arXiv:2102.06171, section 4.1.
    """
    for name, function, of in (
        ("stacked", stacked, "path"), ("axis", axis, "path and the shape"),
    ):  # fmt: skip
        _validate.kind(
            name,
            function,
            (Callable, type(None)),
            f"a function of the {of} of a leaf, or None",
        )
    return Units(stacked, axis)


def _as_tuple(axis: Any) -> tuple[int, ...]:
    axes = _validate.as_ints(axis)
    if axes is not None:
        return axes
    advice = f"Negative ones count from the end. {_validate.static('axis', axis)}"
    if isinstance(axis, (list, np.ndarray)) and np.ndim(axis) == 1:
        advice = f"Pass axis={tuple(np.asarray(axis).tolist())}."
    raise TypeError(_validate.must_be("axis", "an int or tuple of ints", axis, advice))
