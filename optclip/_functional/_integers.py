"""Clip the elements of one integer array, as TensorFlow does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _memory, _numerics, _prefix, _validate
from .._typing import Mask, Number, PyTree


def is_integers(tree: PyTree) -> bool:
    """Return whether a tree is one array of integers, or an int."""
    if isinstance(tree, (jax.Array, np.ndarray, np.generic)):
        return bool(jnp.issubdtype(tree.dtype, jnp.integer))
    return isinstance(tree, int) and not isinstance(tree, bool)


def clip_integers(
    x: Any, bounds: dict[str, Number | None], mask: Mask | None
) -> jax.Array | np.ndarray:
    """Return an array of integers with its elements moved to integer bounds.

    Args:
      x: The array.
      bounds: By name `limit`, or `lower` and `upper`.
      mask: As passed by the user.
    """
    _prefix.spread_mask("mask", mask, _leaves.flatten(x), [True])
    # JAX without x64 narrows 64-bit integers of NumPy, which wraps large ones.
    is_narrowed = not isinstance(x, int) and jnp.result_type(x) != x.dtype
    checked = {
        name: None if bound is None else _checked(name, bound, x, is_narrowed)
        for name, bound in bounds.items()
    }
    array: Any = x if is_narrowed else jnp.asarray(_memory.on_device(x))
    lower, upper = _both(checked, array.dtype)
    if is_narrowed:
        out = array if upper is None else np.minimum(array, upper)
        return out if lower is None else np.maximum(out, lower)
    out: Any = array
    if upper is not None:
        out = jnp.minimum(out, _numerics.broadcast_like(jnp.asarray(upper), array))
    if lower is not None:
        out = jnp.maximum(out, _numerics.broadcast_like(jnp.asarray(lower), array))
    return _memory.back(_leaves.narrow(out, array), x)


def _checked(name: str, bound: Any, x: Any, is_narrowed: bool) -> Any:
    """Return a bound, in NumPy for an array that JAX would narrow."""
    if not is_integers(bound):
        wanted = "an integer, an array of integers or None, since integers are clipped"
        advice = "Pass integer bounds, or convert the clipped array to floats."
        raise TypeError(_validate.must_be(name, wanted, bound, advice))
    _validate.broadcasts(name, jnp.shape(bound), jnp.shape(x), "the array")
    if not is_narrowed or isinstance(bound, int):
        return bound
    known = _validate.concrete(bound)
    if known is None:
        wanted = f"concrete for {x.dtype}, which JAX narrows to {jnp.result_type(x)}"
        advice = "Set jax_enable_x64, or convert the clipped array to a 32-bit dtype."
        raise TypeError(_validate.must_be(name, wanted, bound, advice))
    return known


def _both(bounds: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    """Return both bounds in the dtype of the array; None where there is none."""
    if "limit" not in bounds:
        pairs = (bounds["lower"], bounds["upper"])
        lower, upper = (None if x is None else _saturated(x, dtype) for x in pairs)
        return lower, upper
    limit, info = bounds["limit"], jnp.iinfo(dtype)
    if isinstance(limit, int):
        return _saturated(-limit, dtype), _saturated(limit, dtype)
    of = _module(limit)
    # A traced negative limit counts as 0.
    upper = of.maximum(_saturated(limit, dtype), np.zeros((), dtype))
    if info.min == 0:
        return np.zeros((), dtype), upper
    # The smallest number has no negative in the dtype.
    is_unbounded = limit > _cap(info.max, limit.dtype)
    return of.where(is_unbounded, np.asarray(info.min, dtype), -upper), upper


def _saturated(bound: Any, dtype: Any) -> Any:
    """Return a bound in a dtype; outside its range, the nearest number of the dtype.

    JAX promotes `uint8 <= 299` to a comparison of 8-bit integers.
    """
    info = jnp.iinfo(dtype)
    if isinstance(bound, int):
        return np.asarray(min(max(bound, info.min), info.max), dtype)
    least, most = (_cap(end, bound.dtype) for end in (info.min, info.max))
    of = _module(bound)
    return of.minimum(of.maximum(bound, least), most).astype(dtype)


def _cap(end: int, dtype: Any) -> np.ndarray:
    """Return the number of a dtype that is nearest to `end`."""
    info = jnp.iinfo(dtype)
    return np.asarray(min(max(end, info.min), info.max), dtype)


def _module(x: Any) -> Any:
    """Return `jax.numpy` for its arrays, else NumPy, which has 64 bits without x64."""
    return jnp if isinstance(x, jax.Array) else np
