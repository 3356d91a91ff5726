"""Place arrays on a mesh like other arrays, by their types.

On Explicit axes the type of an array determines its placement, and a state whose type
changes cannot be scanned. Inside `shard_map` the type names the axes it varies over.
"""

from __future__ import annotations

import math
from typing import Any

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
    if place is not None and jax.sharding.get_abstract_mesh().empty:
        place = _concrete(place, tree)
    if place is None:
        return jnp.zeros(norm.shape, norm.dtype)
    if isinstance(place.mesh, Mesh):
        return jax.device_put(jnp.zeros(norm.shape, norm.dtype), place)
    return jnp.zeros(norm.shape, norm.dtype, out_sharding=place)


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
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if mesh is not None and mesh.abstract_mesh == place.mesh:
            return NamedSharding(mesh, place.spec)
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
    there, here = (_axis_names.varying(jax.typeof(each)) for each in (like, x))
    axes = tuple(sorted(there - here, key=str))
    return lax.pcast(x, axes, to="varying") if axes else x
