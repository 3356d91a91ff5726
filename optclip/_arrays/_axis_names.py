"""Find the mapped axes that split a leaf, from its type or from `axis_name=`.

`axis_name=` is None (read the types), a name, a tuple of names (`()` for none), a
`jax.sharding.PartitionSpec`, which also specifies the dimensions; a prefix tree of
these, or a function that returns one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable
from numbers import Number
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, Sharding

from . import _leaves, _prefix, _validate
from ._types import AxisName, KeyPath, LeafLike

# JAX before 0.10.0 records the axes that an array varies over in another attribute.
IS_OLD = not hasattr(jax.typeof(0.0), "manual_axis_type")

Axes = tuple[Hashable, ...]
_WANTED = (
    "a name, a tuple of names (() for none), a PartitionSpec (the .spec of a"
    " NamedSharding), a tree of these, or None to read the types of the leaves"
)
_MAPPED = (
    "an axis of the enclosing shard_map, pmap or vmap(axis_name=...), or () for none"
)


def check(axis_name: AxisName | None, *, by_leaf: bool = True) -> None:
    """Raise unless this names mapped axes as in `jax.lax.psum`, per leaf or not."""
    if callable(axis_name) and by_leaf:
        return
    declared = jax.tree.leaves(axis_name, is_leaf=_is_one) if by_leaf else [axis_name]
    for axes in declared:
        is_valid = _is_one(axes) and not (callable(axes) or isinstance(axes, Sharding))
        _validate.require("axis_name", axis_name, is_valid, _WANTED, error=TypeError)
        if isinstance(axes, tuple) and len(set(axes)) < len(axes):
            raise ValueError(
                f"`axis_name` names an axis twice, got {axes}. Pass each axis once."
            )


def by_leaf(axis_name: AxisName | None, flat: _leaves.Flat) -> list[Any]:
    """Return the declared axes of each leaf, in order."""
    declared = axis_name
    if callable(declared):
        declared = _prefix.described("axis_name", declared, flat.tree)
        check(declared)
    if _is_one(declared):
        return [declared] * len(flat.leaves)
    return flat.treedef.flatten_up_to(
        _prefix.spread_prefix("axis_name", declared, flat.tree, is_leaf=_is_one)
    )


def check_known() -> None:
    """Raise if neither types nor `axis_name=` specify which leaves are split.

    Never raises inside `jax.vmap(axis_name=...)`, where a leaf belongs to one example,
    as in any vmap.
    """
    if axes := untyped_axes():
        raise ValueError(
            "Inside pmap, or shard_map with check_vma=False, array types do not specify"
            " whether a device has a whole leaf or a slice of it. Pass axis_name=() if"
            f" each device has whole gradients, as after jax.lax.pmean(grads, {axes});"
            " otherwise pass the axes that split the leaves, or their PartitionSpecs."
        )


def check_all_known() -> None:
    """Raise likewise if devices must agree on all slices or elements."""
    if untyped_axes():
        raise ValueError(
            "Inside pmap, or shard_map with check_vma=False, devices may learn"
            " different thresholds for slices or elements, and scale differently with"
            " response='proportional'. Use check_vma=True. If each device has whole"
            " gradients, pass axis_name=() instead, for elements to optclip.clip_by"
            " with over='element'."
        )


def split_axes(x: jax.Array, declared: AxisName | None = None) -> Axes:
    """Return the mapped axes that split `x`.

    Inside `jax.shard_map` an array's type names the mesh axes it varies over. A
    replicated array varies over none and counts once, whatever is declared.
    """
    varying_axes = varying(jax.typeof(x))
    if declared is None:
        return tuple(sorted(varying_axes, key=str))
    if isinstance(declared, PartitionSpec):
        names = tuple(name for dim in declared for name in _names_of(dim))
    else:
        names = declared if isinstance(declared, tuple) else (declared,)
    return tuple(n for n in names if n in varying_axes or not _is_typed(n))


def split_axes_of_slices(
    x: jax.Array,
    shape: tuple[int, ...],
    axis: tuple[int, ...] | None,
    declared: AxisName | None = None,
) -> Axes:
    """Return the mapped axes that split the slices of a leaf with the numbers `x`.

    Raises:
      ValueError: The axes depend on the leaf's `PartitionSpec`, which was not passed.
    """
    if isinstance(declared, PartitionSpec) and len(declared) > len(shape):
        raise ValueError(
            f"`axis_name` must have at most one entry per dimension of a leaf, got"
            f" {len(declared)} in {declared} for the shape {shape}. Pass a tree with a"
            " PartitionSpec for each leaf."
        )
    if axis is None:
        return split_axes(x, declared)
    if not axis:
        return ()  # Each element is on one device.
    if isinstance(declared, PartitionSpec):
        return split_axes(x, _dims(declared, axis))
    split = split_axes(x, declared)
    if split and declared is None:
        raise ValueError(
            f"The norms over the axes {axis} of a leaf that is split over the mesh axes"
            f" {split} are unknown, since its type does not specify the split"
            " dimension. Pass the PartitionSpecs of the leaves (the in_specs of"
            " shard_map) as axis_name, or axis_name=() if no slice is split."
        )
    return split


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Declared:
    """Hold the declaration of one array, None for nothing: a pytree without leaves."""

    axis_name: AxisName | None = None


def declared_across_slices(axis: tuple[int, ...], declared: AxisName | None) -> Any:
    """Return the declaration of an array with one value per slice; None for nothing."""
    if isinstance(declared, PartitionSpec):
        return _dims(declared, [a for a in range(len(declared)) if a not in axis])
    return declared if axis == () else None


def axes_size(axes: Axes) -> int:
    """Return the number of devices that a leaf is split over."""
    return math.prod(lax.axis_size(name) for name in axes)


def check_reduced(path: KeyPath, leaf: LeafLike) -> None:
    """Raise if a leaf has yet to be summed over devices."""
    # Only the type is read, since reading more would copy a NumPy leaf.
    kind = jax.typeof(leaf)
    if axes := _manual(kind, "unreduced") | kind.sharding.spec.unreduced:
        raise ValueError(
            f"{_leaves.named(path, 'The')} is unreduced over the mesh axes"
            f" {tuple(sorted(axes, key=str))}, so its norm is unknown. Reduce it before"
            " clipping: jax.reshard to a spec without unreduced, or jax.lax.psum inside"
            " shard_map."
        )


def check_replicated(name: str, value: Any, leaf: jax.Array) -> None:
    """Raise if a threshold differs between devices that share a norm."""
    if axes := apart(value, leaf):
        raise ValueError(
            f"{_validate.quoted(name)} varies over the mesh axes {axes}, whose"
            " devices share a norm, so each would clip to its own threshold. Replicate"
            f" its value x: {maximum_of('x', axes)}; or clip on each device"
            " separately, with axis_name=()."
        )


def maximum_of(name: str, axes: Axes) -> str:
    """Return code for the maximum over devices; `pmax` alone drops NaN on CPU."""
    return (
        f"jnp.where(jax.lax.psum(jnp.isnan({name}), {axes}) > 0, jnp.nan,"
        f" jax.lax.pmax({name}, {axes}))"
    )


def apart(value: Any, other: Any) -> Axes:
    """Return the mapped axes that `value` varies over and `other` does not."""
    axes, shared = varying(jax.typeof(value)), varying(jax.typeof(other))
    return tuple(sorted(axes - shared, key=str))


def _is_one(declared: AxisName | None) -> bool:
    """Return whether this is for one leaf rather than a tree of declarations."""
    if declared is None or isinstance(declared, PartitionSpec):
        return True
    if isinstance(declared, tuple):
        return all(_is_name(name) for name in declared) and not hasattr(
            declared, "_fields"
        )
    return _is_name(declared)


def _is_name(value: Any) -> bool:
    # In `lax` a number would name an axis of the array itself.
    if value is None or isinstance(value, (Number, PartitionSpec)):
        return False
    return isinstance(value, Hashable) and jax.tree_util.all_leaves([value])


def _dims(spec: PartitionSpec, axis: Iterable[int]) -> PartitionSpec:
    return PartitionSpec(*(spec[a] for a in axis if a < len(spec)))


def _names_of(dim: Any) -> Axes:
    if dim is None:
        return ()
    names = dim if isinstance(dim, tuple) else (dim,)
    if PartitionSpec.UNCONSTRAINED in names:
        raise ValueError(
            "`axis_name` has a PartitionSpec with UNCONSTRAINED, which does not specify"
            " how a dimension is split. Pass the names of mesh axes, or None."
        )
    return names


def varying(kind: Any) -> frozenset[Hashable]:
    """Return the mesh axes that an array of a type, as of `jax.typeof`, varies over."""
    return _manual(kind, "varying")


def _manual(kind: Any, word: str) -> frozenset[Hashable]:
    if IS_OLD:
        return (kind.vma if word == "varying" else None) or frozenset()
    manual = kind.manual_axis_type
    return frozenset() if manual is None else getattr(manual, word)


def is_typed_here() -> bool:
    """Return whether this runs inside `shard_map` with types that name varying axes."""
    return any(map(_is_typed, jax.sharding.get_abstract_mesh().manual_axes))


def untyped_axes() -> Axes:
    """Return the mapped axes of several devices if types do not name varying axes.

    On one device a leaf is whole, so its norm is known without a type.
    """
    if is_typed_here():
        return ()
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in axes if lax.axis_size(name) > 1)


def _is_typed(name: Hashable) -> bool:
    """Return whether types name a varying axis: in shard_map with check_vma."""
    try:
        index = lax.axis_index(name)
    except NameError:
        there = jax.sharding.get_abstract_mesh().manual_axes
        advice = "No axis is mapped here: under jax.jit alone, omit axis_name."
        advice = f"The mesh axes mapped here are {there}." if there else advice
        message = _validate.must_be("axis_name", _MAPPED, name, advice)
        raise ValueError(message) from None
    return bool(varying(jax.typeof(index)))
