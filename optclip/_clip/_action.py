"""Define how the leaves of a block change, and how thresholds are fitted to norms."""

from __future__ import annotations

import abc
import numbers
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optclip._arrays import _axis_names, _numerics, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._numerics import select
from optclip._arrays._types import Leaf, Number
from optclip._clip._clip import Clip, Decision
from optclip.norms._interface import LEAST

Limit = TypeVar("Limit", bound=jax.Array | np.ndarray)

# A smaller threshold counts as 0 in strict clipping: at 2**-36, the flushed squares of
# 2**40 elements, each below 2**-126, are a fraction of 2**-14 of the squared norm, or
# 2**-15 of the norm.
_LEAST_STRICT = {"float32": 2.0**-36, "float64": 2.0**-450}


class Action(abc.ABC):
    """Fit thresholds to norms, and change leaves.

    `_build.parts_of` chooses `Scale`, `Move` or the action of `spectral`. By default
    there is one threshold and one coefficient for each norm.
    """

    def fit(
        self, clip: Clip, values: dict[str, list[Number] | Batched], norms: Batched
    ) -> Batched:
        """Return the threshold of each block in the dtype and shape of its norm.

        Negative ones become 0. Values that are stacked as the norms are stay stacked.

        Raises:
          ValueError: A threshold does not broadcast to the shape of its norm.
        """
        ((name, of_blocks),) = values.items()
        least = _LEAST_STRICT if clip.strict else LEAST

        def with_zeros(limits: Batched) -> Batched:
            return limits.map(lambda c: zero_below(least[c.dtype.name], c))

        if isinstance(of_blocks, Batched):
            pairs = zip(of_blocks.values, norms.values, strict=True)
            stacks = [_fitted(clip, name, *pair, least)[0] for pair in pairs]
            return with_zeros(Batched.tree_unflatten(norms.indices, stacks))
        limits: dict[int, tuple[jax.Array, bool]] = {}
        for index, stack in zip(norms.indices, norms.values, strict=True):
            # The norms of a stack have one type, so the first represents all.
            norm = stack if len(index) == 1 else stack[0]
            for i in index:
                limits[i] = _fitted(clip, name, of_blocks[i], norm, least)
        fitted = [limits[i] for i in range(len(of_blocks))]
        batched = norms.with_entries([limit for limit, _ in fitted])
        if all(is_final for _, is_final in fitted):
            return batched
        return with_zeros(batched)

    def per_norm(self, thresholds: Batched, norms: Batched) -> Batched:
        """Return one fitted threshold for each norm."""
        del norms
        return thresholds

    @abc.abstractmethod
    def apply(self, decision: Decision) -> tuple[dict[int, Leaf], Batched]:
        """Return the clipped leaves by their index, and the coefficients."""

    def recorded(
        self, decision: Decision, coefficients: Batched
    ) -> tuple[Batched, Batched]:
        """Return the threshold and the coefficient of each norm for the record."""
        return decision.thresholds, coefficients


def _fitted(
    clip: Clip, name: str, value: Number, norm: jax.Array, least: dict[str, float]
) -> tuple[jax.Array, bool]:
    """Return the threshold, and whether `zero_below` has been applied to it."""
    limit = as_limit(value, norm.dtype)
    check_replicated(clip, name, limit, norm)
    is_final = isinstance(limit, np.ndarray)
    if is_final:
        limit = zero_below(least[norm.dtype.name], limit)
    _validate.broadcasts(name, limit.shape, norm.shape)
    return _numerics.broadcast_like(jnp.asarray(limit), norm), is_final


def check_replicated(clip: Clip, name: str, limit: Number, norm: jax.Array) -> None:
    """Raise if a threshold or `eps` varies over devices that share the norm."""
    for argument, value in ((name, limit), ("eps", clip.eps)):
        if isinstance(value, jax.Array):
            _axis_names.check_replicated(argument, value, norm)


def zero_below(least: float, limit: Limit) -> Limit:
    """Return the threshold, or 0 if it is below `least`.

    A NumPy array stays one, since the program then has nothing left to compute.
    """
    if isinstance(limit, np.ndarray):
        return np.where(limit < least, np.zeros_like(limit), limit)
    # A threshold of 0 is not replaced, so it keeps its derivative from above.
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
    # A finite threshold is kept within the dtype, where the cast would give inf.
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
