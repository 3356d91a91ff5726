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

    A NumPy array stays one, since the program then has nothing left to compute.
    """
    if isinstance(limit, np.ndarray):
        return np.where(limit < least, np.zeros_like(limit), limit)
    # A threshold of 0 is not replaced, so that it keeps its derivative from above.
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
    # A finite threshold above the largest number becomes it; the cast would give inf.
    bounded = np.where(np.isinf(exact), exact, np.clip(exact, -largest, largest))
    limit = bounded.astype(dtype)
    if not towards_zero:
        return limit
    # The cast rounds to nearest; a threshold that grew moves back by one step.
    grew = np.abs(limit.astype(np.float64)) > np.abs(exact)
    return np.where(grew, np.nextafter(limit, np.zeros_like(limit)), limit)


def _narrowed(value: jax.Array, dtype: DTypeLike, *, towards_zero: bool) -> jax.Array:
    """Return an array in `dtype`, in the way of `as_limit`."""
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 8:
        # Only float64 is rounded or exceeds the largest number.
        return value.astype(dtype)
    largest = jnp.asarray(jnp.finfo(dtype).max, value.dtype)
    bounded = jnp.where(jnp.isinf(value), value, jnp.clip(value, -largest, largest))
    limit = bounded.astype(dtype)
    if not towards_zero:
        return limit
    grew = jnp.abs(limit.astype(value.dtype)) > jnp.abs(value)
    return jnp.where(grew, jnp.nextafter(limit, jnp.zeros_like(limit)), limit)
