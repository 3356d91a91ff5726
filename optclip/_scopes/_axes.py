"""Scope norms to slices of each leaf, along given axes or per unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from .._arrays import _leaves, _prefix, _validate
from .._arrays._leaf import counted_from_zero
from .._arrays._types import KeyPath, LeafLike, PyTree
from .._norms import Block
from ._scope import PerLeaf, Scope

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
        if len(shape) - first < 2:
            return tuple(range(first, len(shape)))
        return tuple(range(first, len(shape) - 1))


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
        wanted = f"a function of the {of} of a leaf, or None"
        _validate.kind(name, function, (Callable, type(None)), wanted)
    return Units(stacked, axis)


def _as_tuple(axis: Any) -> tuple[int, ...]:
    axes = _validate.as_ints(axis)
    if axes is not None:
        return axes
    advice = f"Negative ones count from the end. {_validate.static('axis', axis)}"
    if isinstance(axis, (list, np.ndarray)) and np.ndim(axis) == 1:
        advice = f"Pass axis={tuple(np.asarray(axis).tolist())}."
    raise TypeError(_validate.must_be("axis", "an int or tuple of ints", axis, advice))
