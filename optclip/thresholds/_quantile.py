"""The threshold that is a quantile of the last norms."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _numerics, _validate
from optclip._arrays._types import Number, PyTree
from optclip.thresholds import _window
from optclip.thresholds._rule import Seen
from optclip.thresholds._window import Window


class _Place(NamedTuple):
    """Where a quantile lies among `num_known` sorted norms.

    It is `fraction` of the way from the index `low` to the next.
    """

    num_known: jax.Array
    low: jax.Array
    fraction: jax.Array


def _interpolated(ring: jax.Array, place: _Place) -> jax.Array:
    """Return the quantile at a place among the known norms, per norm of the scope."""
    count, low, fraction = place
    is_filled = _window.is_known(ring, count)
    ordered = jnp.sort(
        jnp.where(is_filled, ring, jnp.full_like(ring, jnp.inf)), axis=-1
    )
    places = _window.places(ring)

    def at(index: jax.Array) -> jax.Array:
        # The entry is selected by a sum, since indexing needs an output sharding on a
        # mesh of Explicit axes.
        here = places == _window.along(index, ring)
        return jnp.sum(jnp.where(here, ordered, jnp.zeros_like(ordered)), axis=-1)

    a, b = at(low), at(jnp.minimum(low + 1, jnp.maximum(count - 1, 0)))
    # Without any known norm both are inf, and inf - inf would be NaN.
    step = jnp.where(jnp.isfinite(a), b - a, jnp.zeros_like(a))
    return a + step * fraction


@dataclasses.dataclass(frozen=True)
class Quantile:
    """See `quantile`."""

    takes_vector: ClassVar[bool] = True

    q: Number
    window: int

    def __post_init__(self) -> None:
        _validate.fraction("q", self.q)
        _validate.length("window", self.window)

    def init(self, norm: PyTree) -> Window:
        return _window.empty(norm, self.window)

    def update(self, seen: Seen, memory: Window) -> tuple[PyTree, Window]:
        new = _window.with_norms(memory, seen.norm, self.window)

        def among(ring: jax.Array, old: jax.Array, finite: jax.Array) -> jax.Array:
            # A non-finite norm is excluded from its own threshold; `nonfinite=` decides
            # how it is clipped.
            ring = jnp.where(_window.along(finite, ring), ring, old)
            counts = new.num_known, memory.num_known
            pairs = zip(*(self._place(n, ring.dtype) for n in counts), strict=True)
            place = [
                jnp.where(finite, *(_numerics.broadcast_like(x, finite) for x in pair))
                for pair in pairs
            ]
            return _interpolated(ring, _Place(*place))

        thresholds = jax.tree.map(among, new.norms, memory.norms, seen.finite)
        return thresholds, new

    def _place(self, count: jax.Array, dtype: np.dtype) -> _Place:
        q = _validate.concrete(self.q)
        if q is None:
            last = jnp.maximum(count - 1, 0).astype(dtype)
            place = jnp.asarray(self.q).astype(dtype) * last
            low = jnp.floor(place)
            return _Place(count, low.astype(jnp.int32), place - low)
        # In float64, or a large step between two norms would show the rounding.
        places = float(q) * np.arange(-1, self.window).clip(0)
        low, fraction = np.floor(places), places - np.floor(places)
        low, fraction = jnp.asarray(low, jnp.int32), jnp.asarray(fraction, dtype)
        return _Place(count, low[count], fraction[count])


def quantile(q: Number = 0.1, window: int = 1000) -> Quantile:
    r"""A quantile of the last norms, the current one among them.

    .. math:: c_t = \mathrm{quantile}_q(n_{t-window+1}, \ldots, n_t)

    Clips about 1 - q of the steps while norms keep their level: 0.9 clips one step in
    ten, and the paper's 0.1 nine in ten. More are clipped while norms rise, fewer while
    they fall.

    Args:
      q: a scalar from 0 to 1, traced or not; about 1 - q of the steps are clipped.
      window: how many norms are kept, an int; the memory is that many floats for each
        norm of the scope.

    Returns:
      A rule for any scope and norm. Between two norms it is interpolated linearly, as
      `numpy.quantile` does.

    Raises:
      TypeError, ValueError: `q` is not a number from 0 to 1, or `window` not an int of
        1 or more.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first step         its own norm: nothing is clipped
    fewer than window  the quantile of all so far
    zero norm          counts as any other
    NaN or inf norm    the quantile without it; it never enters the memory
    warm-up            none
    this step's norm   is in the window, unclipped
    ================== ==============================================================

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

    Source: Seetharaman, Wichern, Pardo, Le Roux, *AutoClip: Adaptive Gradient Clipping
    for Source Separation Networks*, 2020, arXiv:2007.14469.
    """
    return Quantile(q, window)
