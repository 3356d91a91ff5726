"""A threshold as a number of a dtype."""

from __future__ import annotations

import numbers
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optclip._arrays._numerics import select
from optclip._arrays._types import Number

Limit = TypeVar("Limit", bound=jax.Array | np.ndarray)


def zero_below(least: float, limit: Limit) -> Limit:
    """Return the threshold, or 0 if it is below `least`.

    At 0 it keeps the derivative from above. A NumPy array stays one, since the program
    then has nothing left to compute.
    """
    if isinstance(limit, np.ndarray):
        return np.where(limit < least, np.zeros_like(limit), limit)
    return select((limit < least) & (limit != 0), jnp.zeros_like(limit), limit)


def as_limit(
    value: Number, dtype: DTypeLike, *, towards_zero: bool = False
) -> jax.Array | np.ndarray:
    """Return a threshold in `dtype`, a NumPy array if it is a number or NumPy array.

    A finite threshold stays finite, since an infinite one would change nothing.
    """
    if not isinstance(value, (numbers.Real, np.ndarray)):
        return _narrowed(jnp.asarray(value), dtype, towards_zero=towards_zero)
    exact = np.asarray(value, np.float64)
    largest = float(jnp.finfo(dtype).max)
    bounded = np.where(np.isinf(exact), exact, np.clip(exact, -largest, largest))
    found = bounded.astype(dtype)
    if towards_zero:
        grew = np.abs(found.astype(np.float64)) > np.abs(exact)
        found = np.where(grew, np.nextafter(found, np.zeros_like(found)), found)
    return found


def _narrowed(value: jax.Array, dtype: DTypeLike, *, towards_zero: bool) -> jax.Array:
    found = value.astype(dtype)
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 8:
        return found
    largest = jnp.asarray(jnp.finfo(dtype).max, value.dtype)
    kept = jnp.where(jnp.isinf(value), value, jnp.clip(value, -largest, largest))
    found = kept.astype(dtype)
    if not towards_zero:
        return found
    grew = jnp.abs(found.astype(value.dtype)) > jnp.abs(value)
    return jnp.where(grew, jnp.nextafter(found, jnp.zeros_like(found)), found)
