"""Place arrays on a mesh, on devices or in a memory like other arrays.

On Explicit axes the type of an array determines its placement, and a state whose type
changes cannot be scanned. Inside `shard_map` the type names the axes it varies over.
Outside of `jit`, leaves may be on devices that no single computation accepts.

JAX rejects operations of an array in host memory, such as an offloaded gradient, with
one in device memory. Leaves are moved where they enter a computation, and the results
where they leave it, so that norms, thresholds and constants are always on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _axis_names
from ._types import PyTree


def zeros(norm: jax.ShapeDtypeStruct, tree: PyTree) -> jax.Array:
    """Return zeros for a norm of `tree`, of the type that the norm has on a mesh."""
    if axes := tuple(sorted(_axis_names.varying(norm), key=str)):
        return lax.pcast(jnp.zeros(norm.shape, norm.dtype), axes, to="varying")
    place = norm.sharding
    if (
        place is not None
        and not isinstance(place.mesh, Mesh)
        and jax.sharding.get_abstract_mesh().empty
    ):
        place = _concrete(place, tree)
    if place is None or isinstance(place.mesh, Mesh):
        return jnp.zeros(norm.shape, norm.dtype, device=place)
    return jnp.zeros(norm.shape, norm.dtype, out_sharding=place)


def placed(norm: jax.ShapeDtypeStruct, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the type of norms of elements or slices, split like a leaf on Auto axes.

    Otherwise each device would start with a whole memory of the size of the parameters,
    and the second step would compile another program.
    """
    place = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(place, NamedSharding) or norm.ndim != leaf.ndim:
        return norm
    dims = zip(place.spec, norm.shape, leaf.shape, strict=False)
    spec = PartitionSpec(*(name if n == size else None for name, n, size in dims))
    sharding = NamedSharding(place.mesh, spec)
    return jax.ShapeDtypeStruct(norm.shape, norm.dtype, sharding=sharding)


def no_flags(like: jax.Array) -> jax.Array:
    """Return False for each entry of the first axis of `like`, sharded like it."""
    if AxisType.Explicit not in jax.typeof(like).sharding.mesh.axis_types:
        return jnp.zeros(like.shape[0], bool)
    # Computed from the array, since inside `jit` without `jax.set_mesh` nothing else
    # specifies the devices. XLA folds this to a constant.
    return jnp.any(jnp.zeros_like(like, bool), axis=tuple(range(1, like.ndim)))


def _concrete(place: Any, tree: PyTree) -> Any:
    """Return the sharding on the devices of `tree`; None if its leaves are traced."""
    for x in jax.tree.leaves(tree):
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
        is_named = isinstance(sharding, NamedSharding)
        if is_named and sharding.mesh.abstract_mesh == place.mesh:
            return NamedSharding(sharding.mesh, place.spec)
    return None


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` split like `like` on Explicit axes, so a state keeps its placement."""
    here, there = jax.typeof(x).sharding, jax.typeof(like).sharding
    # A NumPy array has no mesh yet.
    mesh = there.mesh if here.mesh.empty else here.mesh
    if AxisType.Explicit not in mesh.axis_types or here == there:
        return x
    spec = there.spec if there.mesh == mesh else PartitionSpec(*[None] * x.ndim)
    return jax.reshard(x, NamedSharding(mesh, spec))


def whole(x: jax.Array) -> jax.Array:
    """Return `x` gathered on Explicit axes, as sorting requires."""
    here = jax.typeof(x).sharding
    if AxisType.Explicit not in here.mesh.axis_types:
        return x
    return jax.reshard(x, NamedSharding(here.mesh, PartitionSpec(*[None] * x.ndim)))


def along(vector: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Return a vector with an entry per index of an axis of `like`, of its rank.

    On Explicit axes it is split like that axis.
    """
    there = jax.typeof(like).sharding
    if AxisType.Explicit in there.mesh.axis_types:
        spec = PartitionSpec(there.spec[axis])
        vector = jax.reshard(vector, NamedSharding(there.mesh, spec))
    return lax.expand_dims(vector, [a for a in range(like.ndim) if a != axis])


def divisible(x: jax.Array, size: int) -> jax.Array:
    """Return `x`, gathered on its first Explicit axis if `size` does not fit."""
    here = jax.typeof(x).sharding
    if AxisType.Explicit not in here.mesh.axis_types or not here.spec[0]:
        return x
    names = here.spec[0] if isinstance(here.spec[0], tuple) else (here.spec[0],)
    devices = math.prod(here.mesh.shape[name] for name in names)
    if x.shape[0] % size == 0 and size % devices == 0:
        return x
    return jax.reshard(x, NamedSharding(here.mesh, PartitionSpec(None, *here.spec[1:])))


def stacked_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` once per row of `like`, on Explicit axes split like these rows."""
    stacked = jnp.broadcast_to(x, (like.shape[0], *x.shape))
    there = jax.typeof(like).sharding
    if AxisType.Explicit not in there.mesh.axis_types:
        return stacked
    spec = PartitionSpec(there.spec[0], *jax.typeof(x).sharding.spec)
    return jax.reshard(stacked, NamedSharding(there.mesh, spec))


def varying_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` with the varying axes of `like` that its type lacks."""
    axes = _axis_names.apart(like, x)
    return lax.pcast(x, axes, to="varying") if axes else x


class Devices(NamedTuple):
    """Hold the devices of an array, and its mesh if that has Explicit axes.

    Both are None where they are not known or do not matter.
    """

    devices: tuple[Any, ...] | None
    mesh: Any


def devices_of(x: Any) -> Devices:
    """Return where computations with an array must run."""
    if isinstance(x, Tracer):
        # Below `jax.set_mesh` and `shard_map`, all arrays are on one mesh.
        is_free = jax.sharding.get_abstract_mesh().empty
        mesh = jax.typeof(x).sharding.mesh if is_free else None
        return Devices(None, _if_typed(mesh))
    if not isinstance(x, jax.Array) or not x.committed:
        return Devices(None, None)
    mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh):
        devices = sorted(x.sharding.device_set, key=lambda device: device.id)
        return Devices(tuple(devices), None)
    return Devices(tuple(mesh.devices.flat), _if_typed(mesh.abstract_mesh))


def _if_typed(mesh: Any) -> Any:
    return mesh if mesh and AxisType.Explicit in mesh.axis_types else None


def are_apart(arrays: Sequence[Any]) -> bool:
    """Return whether no single computation accepts all of these arrays."""
    places = [*map(devices_of, arrays)]
    return any(len({*column} - {None}) > 1 for column in zip(*places, strict=True))


def check_together(named: Sequence[tuple[str, Any]], subject: str, advice: str) -> None:
    """Raise unless one computation accepts all of these arrays.

    Args:
      named: The arrays, each after its name.
      subject: What the arrays are, with a capital.
      advice: The fix, besides moving them.
    """
    for name, x in named[1:]:
        if are_apart([named[0][1], x]):
            places = [f"{name} on {_place(x)}" for name, x in (named[0], (name, x))]
            raise ValueError(
                f"{subject} must be on the same devices or mesh, got {places[0]} and"
                f" {places[1]}. Move them with jax.device_put. {advice}"
            )


def _place(x: jax.Array) -> Any:
    if isinstance(x, Tracer):
        return jax.typeof(x).sharding
    devices = [*x.sharding.device_set]
    return devices[0] if len(devices) == 1 else x.sharding


def beside(x: Any, like: Any) -> Any:
    """Return an array where a computation with `like` accepts it."""
    if not are_apart([x, like]):
        return x
    place = like.sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.device_put(x, place)


def together(tree: PyTree) -> PyTree:
    """Return small arrays where one computation accepts all, on devices of the first.

    The same tree if one accepts them already.
    """
    leaves = jax.tree.leaves(tree)
    if not are_apart(leaves):
        return tree
    first = next(x for x in leaves if devices_of(x).devices is not None)
    return jax.tree.map(lambda x: beside(x, first), tree)


_HOST_KINDS = ("pinned_host", "unpinned_host")


def on_device(tree: PyTree) -> PyTree:
    """Return a tree with its arrays on the device, the same tree if all are there."""
    if not any(map(_is_on_host, jax.tree.leaves(tree))):
        return tree
    space = jax.memory.Space.Device
    return jax.tree.map(
        lambda x: jax.device_put(x, space) if _is_on_host(x) else x, tree
    )


def back(new: PyTree, old: PyTree) -> PyTree:
    """Return `new` with its arrays in host memory where those of `old` are there."""
    if not any(map(_is_on_host, jax.tree.leaves(old))):
        return new
    return jax.tree.map(_moved_back, new, old)


def computed(function: Callable[..., Any], x: PyTree, *others: PyTree) -> Any:
    """Return a function of arrays, computed on the device, in the memory of `x`."""
    return back(function(*on_device((x, *others))), x)


def _is_on_host(x: Any) -> bool:
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return isinstance(x, jax.Array) and x.sharding.memory_kind in _HOST_KINDS


def _moved_back(new: Any, old: Any) -> Any:
    if not _is_on_host(old) or _is_on_host(new):
        return new
    if isinstance(new, Tracer) or isinstance(old, Tracer):
        return jax.device_put(new, jax.memory.Space.Host)
    return jax.device_put(new, new.sharding.with_memory_kind(old.sharding.memory_kind))
