"""Compute on leaves in host memory: move them to the device, and results back.

JAX rejects operations of an array in host memory, such as an offloaded gradient, with
one in device memory. Leaves are moved where they enter a computation, and the results
where they leave it, so that norms, thresholds and constants are always on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from ._types import PyTree

_HOST_KINDS = ("pinned_host", "unpinned_host")


def on_device(tree: PyTree) -> PyTree:
    """Return a tree with its arrays on the device, the same tree if all are there."""
    if not any(map(_is_on_host, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(_moved, tree)


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


def _moved(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Device) if _is_on_host(x) else x


def _moved_back(new: Any, old: Any) -> Any:
    if not _is_on_host(old) or _is_on_host(new):
        return new
    if isinstance(new, Tracer) or isinstance(old, Tracer):
        return jax.device_put(new, jax.memory.Space.Host)
    kind = old.sharding.memory_kind
    return jax.device_put(new, new.sharding.with_memory_kind(kind))
