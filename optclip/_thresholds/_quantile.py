"""A quantile of the last norms as the threshold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _placement, _validate
from .._arrays._types import Number, PyTree
from . import _window
from ._rule import Seen
from ._window import Window


class _Place(NamedTuple):
    """Position of a quantile among `num_known` sorted norms.

    It lies the fraction `fraction` of the way from the index `low` to the next.
    """

    num_known: jax.Array
    low: jax.Array
    fraction: jax.Array


def _interpolated(ring: jax.Array, place: _Place) -> jax.Array:
    """Return the quantile at a position among the stored norms."""
    count, low, fraction = place
    is_filled = _window.is_known(ring, count)
    ordered = jnp.sort(
        jnp.where(is_filled, ring, jnp.full_like(ring, jnp.inf)), axis=-1
    )
    places = _window.places(ring)

    def at(index: jax.Array) -> jax.Array:
        # A masked sum selects the entry, since indexing requires an output sharding on
        # a mesh with Explicit axes.
        here = places == _window.along(index, ring)
        return jnp.sum(jnp.where(here, ordered, jnp.zeros_like(ordered)), axis=-1)

    a, b = at(low), at(jnp.minimum(low + 1, jnp.maximum(count - 1, 0)))
    # Without stored norms both are inf, and inf - inf would be NaN.
    step = jnp.where(jnp.isfinite(a), b - a, jnp.zeros_like(a))
    return a + step * fraction


@dataclasses.dataclass(frozen=True)
class Quantile:
    """See `quantile`."""

    takes_vector: ClassVar[bool] = True
    learns_from_zeros: ClassVar[bool] = False

    q: Number
    window: int

    def init(self, norm: PyTree) -> Window:
        return _window.empty(norm, self.window)

    def update(self, seen: Seen, memory: Window) -> tuple[PyTree, Window]:
        memory = _window.with_integers(memory)
        new = _window.with_norms(memory, seen.norm, self.window)

        def among(
            ring: jax.Array,
            old: jax.Array,
            finite: jax.Array,
            *counts: jax.Array,
        ) -> jax.Array:
            # A non-finite norm is excluded from its own threshold. The policy
            # `nonfinite` then decides about the updates.
            ring = jnp.where(_window.along(finite, ring), ring, old)
            count = jnp.where(finite, *counts)
            return _interpolated(ring, self._place(count, ring.dtype))

        thresholds = jax.tree.map(
            among, new.norms, memory.norms, seen.finite, new.num_known, memory.num_known
        )
        return thresholds, new

    def _place(self, count: jax.Array, dtype: np.dtype) -> _Place:
        q = _validate.concrete(self.q)
        if q is None:
            last = jnp.maximum(count - 1, 0).astype(dtype)
            place = jnp.asarray(self.q).astype(dtype) * last
            low = jnp.floor(place)
            return _Place(count, low.astype(jnp.int32), place - low)
        # Positions are computed in float64: between two very different norms, a
        # rounding error in the position would be a visible error of the quantile.
        places = float(q) * np.arange(-1, self.window).clip(0)
        low, fraction = np.floor(places), places - np.floor(places)
        low = _looked_up(low.astype(np.int32), count)
        return _Place(count, low, _looked_up(fraction.astype(dtype), count))


def _looked_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Return entries of a table; a masked sum, as in `_interpolated`."""
    rows = jnp.broadcast_to(table, (*index.shape, len(table)))
    rows = _placement.placed_as(rows, index[..., None])
    here = _window.places(rows) == _window.along(index, rows)
    return jnp.sum(jnp.where(here, rows, jnp.zeros_like(rows)), -1, dtype=rows.dtype)


def quantile(q: Number = 0.1, window: int = 1000) -> Quantile:
    """Clip to a quantile of the last norms, including this one.

    It clips about `1 - q` of the steps while norms are stationary, more while they
    rise, and fewer while they fall.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(optclip.thresholds.quantile(0.9))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 4.0, 14.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [3.8]
      [12.]

    Args:
      q: Quantile, from 0 to 1. The paper's 0.1 clips nine steps in ten, 0.9 one in ten.
      window: Number of past norms, an int; the memory is that many floats and two
        counts per norm.

    Returns:
      A rule. Quantiles are interpolated linearly, as in `numpy.quantile`. The window
      stores unclipped norms.

    Edge cases:
      - First step: the threshold is its norm, so nothing is clipped.
      - Zero norm: enters the threshold of its step, and is not stored.
      - NaN or inf norm: the threshold is the quantile of the stored norms.

    See Also:
      `recipes.autoclip`.

    References:
      Seetharaman et al., *AutoClip*, 2020, arXiv:2007.14469.
    """
    return Quantile(_validate.fraction("q", q), _validate.length("window", window))
