"""Elements moved to a bound: exactly, where a coefficient would round.

A response may say what it does to a single number by a method
`element(x, lower, upper)`; hard clipping does, so that the bound is met to the bit.
Complex numbers are clipped by their modulus.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optclip import _arithmetic, _leaves, _scale, _sparse


def bounded(
    name: str, leaf: Any, lower: Any, upper: Any, response: Any, *, strict: bool
) -> tuple[Any, jax.Array, jax.Array]:
    """A leaf with its elements moved to the bounds.

    Args:
      name: what to call the leaf in an error.
      leaf: an array, or a BCOO matrix, whose duplicates are summed first.
      lower: broadcasts to the shape of the leaf (dense), in any real dtype.
      upper: likewise.
      response: has `element`.
      strict: whether bounds are rounded towards zero rather than to nearest.

    Returns:
      The leaf; by what factor each element shrank (1 if untouched); and where both
      bounds are infinite.
    """
    mat = _sparse.summed(leaf) if _leaves.is_sparse(leaf) else None
    x = _leaves.values(leaf if mat is None else mat)
    wide = _leaves.widen(x)
    size = jnp.abs(wide)
    lower, upper = (
        _at(name, which, bound, leaf.shape if mat else x.shape, mat, size.dtype)
        for which, bound in (("lower", lower), ("upper", upper))
    )
    if jnp.iscomplexobj(wide):
        goal = response.element(size, jnp.maximum(lower, 0), jnp.maximum(upper, 0))
        moved = goal != size
        # Halves: the modulus of a finite number may be above the largest float.
        half = jnp.abs(wide * 0.5)
        safe = jnp.where(half > 0, half, jnp.ones_like(half))
        goal = _arithmetic.over(wide * 0.5, safe) * goal.astype(wide.dtype)
    else:
        goal = response.element(wide, lower, upper)
        moved = goal != wide
    moved &= ~jnp.isnan(size)
    out = jnp.where(moved, _scale.cast(goal, x, towards_zero=strict), x)
    shrunk = jnp.where(
        moved & (size > 0),
        jnp.abs(goal) / jnp.where(size > 0, size, jnp.ones_like(size)),
        jnp.ones_like(size),
    )
    off = jnp.isinf(lower) & jnp.isinf(upper)
    return (out if mat is None else _sparse.with_data(mat, out, leaf)), shrunk, off


def _at(name, which, bound, shape, mat, dtype):
    bound = jnp.asarray(bound).astype(dtype)
    try:
        full = jnp.broadcast_to(bound, shape)
    except ValueError:
        raise ValueError(
            f"{which} has shape {bound.shape}, which does not broadcast to {name} of"
            f" shape {shape} without growing it. Give a number, an array that does, or"
            " a tree with one for each leaf."
        ) from None
    if mat is None:
        return full
    if bound.ndim == 0:
        return jnp.broadcast_to(bound, mat.data.shape)
    return _sparse.at_entries(full, mat)
