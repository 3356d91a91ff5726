"""The scopes of slices of each leaf: along given axes, or by unit."""

import dataclasses
from collections.abc import Callable
from typing import Any

from optclip._arrays import _leaves, _prefix, _validate
from optclip._arrays._types import KeyPath, Leaf, PyTree
from optclip.norms import Block
from optclip.scopes._scope import PerLeaf, Scope

# By path and shape of a leaf: the axes of its norms, or None for those of a unit.
AxesByLeaf = Callable[[str, tuple[int, ...]], int | tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class Axes(PerLeaf):
    """One norm for each slice of each leaf along the given axes. Use `axes(...)`."""

    axis: tuple[int, ...]

    def block(self, path: KeyPath, leaf: Leaf) -> Block:
        return Block([leaf], counted_from_zero(self.axis, leaf, path))


@dataclasses.dataclass(frozen=True)
class Units(Scope):
    """One norm for each unit of each leaf. Use `units(...)`."""

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

    def _axis(self, name: str, x: Leaf) -> tuple[int, ...]:
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
    """The scope of one norm for each slice of each leaf along `axis`.

    Args:
      axis: the axes that a norm is taken over; negative ones count from the end. Every
        leaf must have them. `axes(0)` gives a `(fan_in, units)` kernel one norm a unit.

    Returns:
      A scope for `clip_by(over=...)`; its norms have the leaf's shape with 1 at `axis`.

    Raises:
      TypeError: `axis` is not an int or tuple of ints.
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
    return Axes(_as_tuple(axis))


def units(
    *,
    stacked: Callable[[str], bool] | None = None,
    axis: AxesByLeaf | None = None,
) -> Units:
    """The scope of one norm for each unit: all that feeds one output of a layer.

    That is over all axes but the last, where the layers of Flax, Haiku and Keras have
    their outputs, for leaves of any rank; leaves of rank 1 and 0 are one unit.

    Warning:
      Equinox and haliax have outputs on the first axis, as PyTorch does, where the
      default has one norm per input. Pass
      `axis=lambda path, shape: -1 if len(shape) == 2 else None` for linear layers. For
      other weights return the axes of their inputs, such as `(1, 2, 3)` for an Equinox
      `Conv2d`, and `-1` for a haliax `Linear` stacked as `(layers, outputs, inputs)`.

    Args:
      stacked: a function of the path of a leaf, such as `"layers/dense/kernel"`, that
        returns whether its first axis counts layers, as `jax.lax.scan` over layers
        stacks them; each layer then has units of its own.
      axis: a function of path and shape of a leaf that returns the axes its norms are
        taken over, an int or a tuple; None for the rule above. Attention kernels of
        shape `(inputs, heads, features)` have their outputs on two axes: 0 here.

    Returns:
      A scope for `clip_by(over=...)`; its norms have the leaf's shape with 1 at the
      axes they are taken over.

    Raises:
      TypeError: an argument is not a function; at `init` and `update`, `axis` returned
        neither ints nor None.
      ValueError: at `init` and `update`, a leaf lacks such an axis.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> scope = optclip.units(stacked=lambda path: path.startswith("layers"))
      >>> layers = {"kernel": jnp.ones((12, 64, 256)), "bias": jnp.ones((12, 256))}
      >>> params = {"layers": layers, "head": jnp.ones((256, 10))}
      >>> print(jax.tree.map(lambda block: block.axis, scope.blocks(params)))
      {'head': (0,), 'layers': {'bias': (1,), 'kernel': (1,)}}

    Source: Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition
    Without Normalization*, 2021, arXiv:2102.06171, section 4.1.
    """
    for name, function, of in (
        ("stacked", stacked, "path"), ("axis", axis, "path and the shape"),
    ):  # fmt: skip
        wanted = f"a function of the {of} of a leaf, or None"
        _validate.kind(name, function, (Callable, type(None)), wanted)
    return Units(stacked, axis)


def _as_tuple(axis: Any) -> tuple[int, ...]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
        advice = (
            "Negative ones count from the end. Under optax.inject_hyperparams give a"
            " tuple or name it in static_args=('axis',)."
        )
        raise TypeError(
            _validate.must_be("axis", "an int or tuple of ints", axis, advice)
        )
    return axes


def counted_from_zero(
    axis: tuple[int, ...], x: Leaf, path: KeyPath, name: str = "axis"
) -> tuple[int, ...]:
    shape = getattr(x, "shape", ())
    ndim = len(shape)

    def wrong(wanted: str) -> str:
        leaf = f"{_leaves.named(path)} of shape {shape}"
        return f"`{name}` must name {wanted}, got {axis} for {leaf}."

    if any(not -ndim <= a < ndim for a in axis):
        raise ValueError(
            f"{wrong('axes that each leaf has')} Exclude such leaves with mask=,"
            " or give them to another transformation under optax.masked."
        )
    axes = tuple(sorted(a % ndim for a in axis))
    if len(set(axes)) < len(axes):
        raise ValueError(wrong("each axis once"))
    return axes
