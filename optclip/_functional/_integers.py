"""Clip the elements of integer arrays, as TensorFlow does; reject their norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _numerics, _placement, _prefix, _validate
from .._arrays._types import KeyPath
from .._typing import Mask, Number, PyTree

_KINDS = (jax.Array, np.ndarray, np.generic, int, float, complex)
_FLOATS = "jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)"


def is_data(tree: PyTree) -> bool:
    """Return whether a tree has integers or bools, but no floats: no gradients."""
    leaves = jax.tree.leaves(tree, is_leaf=_leaves.is_sparse)
    # Other kinds, such as tensors of other libraries, are rejected leaf by leaf.
    if not all(isinstance(x, _KINDS) or _leaves.is_sparse(x) for x in leaves):
        return False
    return not any(map(_leaves.is_floating, leaves)) and any(map(_is_whole, leaves))


def raise_if_data(tree: PyTree) -> None:
    """Raise before the norm of a tree in which a norm measures no leaf."""
    if is_data(tree):
        raise TypeError(
            "The tree must have a floating-point or complex leaf, got only integers or"
            f" bools, which enter no norm. Convert them: {_FLOATS}."
        )


def clip_integers(tree: PyTree, bounds: dict[str, PyTree], mask: Mask | None) -> PyTree:
    """Return a tree with the elements of its integers moved to integer bounds.

    Args:
      tree: A tree without floats.
      bounds: By name `limit`, or `lower` and `upper`.
      mask: As passed by the user.
    """
    flat = _leaves.flatten(tree)
    flat.clippable()  # Raises for leaves of other kinds.
    are_integers = [_is_integers(x) for x in flat.leaves]
    in_mask = _prefix.spread_mask("mask", mask, flat, are_integers)
    by_name = {name: _by_leaf(name, bound, flat) for name, bound in bounds.items()}
    out = list(flat.leaves)
    for i, (x, path) in enumerate(zip(flat.leaves, flat.paths, strict=True)):
        if are_integers[i] and in_mask[i]:
            bounds_of_leaf = {name: each[i] for name, each in by_name.items()}
            out[i] = _clip_array(x, path, bounds_of_leaf)
    return flat.rebuild(out)


def _is_whole(x: Any) -> bool:
    """Return whether `x` is an array of integers or bools, or such a number."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, int)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_)


def _is_integers(x: Any) -> bool:
    """Return whether `x` is a dense array of integers, or an int."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return bool(jnp.issubdtype(x.dtype, jnp.integer))
    return isinstance(x, int) and not isinstance(x, bool)


def _by_leaf(name: str, bound: PyTree, flat: _leaves.Flat) -> list[Any]:
    if flat.paths == [()]:
        return [bound]
    spread = _prefix.spread_prefix(name, bound, flat.tree, is_leaf=lambda b: b is None)
    return flat.treedef.flatten_up_to(spread)


def _clip_array(x: Any, path: KeyPath, bounds: dict[str, Number | None]) -> Any:
    # JAX without x64 narrows 64-bit integers of NumPy, which wraps large ones.
    is_narrowed = not isinstance(x, int) and jnp.result_type(x) != x.dtype
    checked = {
        name: None if bound is None else _checked(name, bound, x, path, is_narrowed)
        for name, bound in bounds.items()
    }
    array: Any = x if is_narrowed else jnp.asarray(_placement.on_device(x))
    lower, upper = _both(checked, array.dtype)
    of: Any = np if is_narrowed else jnp
    out = array
    for bound, moved in ((upper, of.minimum), (lower, of.maximum)):
        if bound is not None and not is_narrowed:
            bound = _numerics.broadcast_like(jnp.asarray(bound), array)
        out = out if bound is None else moved(out, bound)
    return out if is_narrowed else _placement.back(_leaves.narrow(out, array), x)


def _checked(name: str, bound: Any, x: Any, path: KeyPath, is_narrowed: bool) -> Any:
    """Return a bound, in NumPy for an array that JAX would narrow."""
    wanted = "an integer, an array of integers or None, since integers are clipped"
    advice = "Pass integer bounds, or convert the clipped array to floats."
    _validate.require(name, bound, _is_integers(bound), wanted, advice, TypeError)
    _validate.broadcasts(name, jnp.shape(bound), jnp.shape(x), _leaves.named(path))
    if not is_narrowed or isinstance(bound, int):
        return bound
    known = _validate.concrete(bound)
    wanted = f"concrete for {x.dtype}, which JAX narrows to {jnp.result_type(x)}"
    advice = "Set jax_enable_x64, or convert the clipped array to a 32-bit dtype."
    _validate.require(name, bound, known is not None, wanted, advice, TypeError)
    return known


def _both(bounds: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    """Return both bounds in the dtype of the array; None where there is none."""
    if "limit" not in bounds:
        lower, upper = (
            None if x is None else _saturated(x, dtype)
            for x in (bounds["lower"], bounds["upper"])
        )
        return lower, upper
    limit, info = bounds["limit"], jnp.iinfo(dtype)
    if limit is None:
        return None, None
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
