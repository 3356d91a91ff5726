"""Thresholds from the last norms: a quantile of them, or mean + k deviations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _numerics, _placement, _validate
from optclip._arrays._types import Number
from optclip.thresholds._rule import Seen, like


class History(NamedTuple):
    """The last norms, a ring: for each norm an array with the window as first axis."""

    norms: Any
    next: jax.Array
    num_known: jax.Array


def _empty(norm: Any, window: int) -> History:
    def ring(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x, shape=(window, *x.shape))

    # Two zeros, not one twice, which could not be donated.
    return History(jax.tree.map(ring, norm), *jnp.zeros((2,), jnp.int32))


def _with(history: History, norm: Any, window: int) -> History:
    """The history with one more norm, in the place of the oldest.

    Raises:
      ValueError: the history is of another window.
    """
    kept = {jnp.shape(ring)[0] for ring in jax.tree.leaves(history.norms)}
    if kept - {window}:
        advice = "Give the window of the run that made the state, or call init anew."
        wanted = f"{kept.pop()}, since the state has as many norms"
        raise ValueError(_validate.must_be("window", wanted, window, advice))

    def with_one(ring: jax.Array, x: jax.Array) -> jax.Array:
        # A restored checkpoint may hold NumPy arrays.
        ring = jnp.asarray(ring)
        return ring.at[history.next].set(_placement.placed_as(x, ring[0]))

    norms = jax.tree.map(with_one, history.norms, norm)
    return History(
        norms,
        (history.next + 1) % window,
        jnp.minimum(history.num_known + 1, window),
    )


def _known(ring: jax.Array, count: jax.Array) -> jax.Array:
    """Which places hold a norm; `count` is a scalar or one for each norm."""
    return _places(ring) < jnp.broadcast_to(count, ring.shape)


def _places(ring: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, ring.shape, 0)


class _Place(NamedTuple):
    """Where a quantile lies among `known` norms in order.

    It is `fraction` of the way from the place `low` to the next.
    """

    known: jax.Array
    low: jax.Array
    fraction: jax.Array


def _at(ring: jax.Array, place: _Place) -> jax.Array:
    """The number at a place among the known ones, for each norm."""
    count, low, fraction = place
    known = _known(ring, count)
    ordered = jnp.sort(jnp.where(known, ring, jnp.full_like(ring, jnp.inf)), axis=0)
    places = _places(ring)

    def at(index: jax.Array) -> jax.Array:
        # No look-up: JAX has to know where one lies on a mesh of Explicit axes.
        here = places == jnp.broadcast_to(index, ring.shape)
        return jnp.sum(jnp.where(here, ordered, jnp.zeros_like(ordered)), axis=0)

    a, b = at(low), at(jnp.minimum(low + 1, jnp.maximum(count - 1, 0)))
    # Nothing is known of nothing: nothing is clipped.
    step = jnp.where(jnp.isfinite(a), b - a, jnp.zeros_like(a))
    return a + step * fraction


@dataclasses.dataclass(frozen=True)
class Quantile:
    """See `quantile`."""

    q: Any
    window: int

    def __post_init__(self) -> None:
        _validate.fraction("q", self.q)
        _validate.length("window", self.window)

    def init(self, norm: Any) -> History:
        return _empty(norm, self.window)

    def update(self, seen: Seen, memory: History) -> tuple[Any, History]:
        new = _with(memory, seen.norm, self.window)

        def among(ring: jax.Array, old: jax.Array, finite: jax.Array) -> jax.Array:
            # A bad norm is left to the policy; the threshold is that of the others.
            ring = jnp.where(finite[None], ring, old)
            counts = new.num_known, memory.num_known
            pairs = zip(*(self._place(n, ring.dtype) for n in counts), strict=True)
            place = [
                jnp.where(finite, *(_numerics.broadcast_like(x, finite) for x in pair))
                for pair in pairs
            ]
            return _at(ring, _Place(*place))

        found = jax.tree.map(among, new.norms, memory.norms, seen.finite)
        return found, new

    def _place(self, count: jax.Array, dtype: Any) -> _Place:
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


@dataclasses.dataclass(frozen=True)
class MeanPlusStd:
    """See `mean_plus_std`."""

    k: Any
    window: int
    warmup: int | None
    ddof: int

    def __post_init__(self) -> None:
        _validate.plain("k", self.k)
        _validate.length("window", self.window)
        if self.warmup is not None:
            _validate.length("warmup", self.warmup)
        _validate.length("ddof", self.ddof, least=0)
        if self._needed > self.window:
            wanted = (
                f"{self._needed} or more with warmup={self.warmup} and ddof={self.ddof}"
            )
            advice = (
                "With fewer norms nothing would ever be clipped. Give a longer window,"
                " or less of these."
            )
            raise ValueError(_validate.must_be("window", wanted, self.window, advice))

    @property
    def _needed(self) -> int:
        """The number of norms from which on there is a threshold."""
        needed = max(2, self.window // 2) if self.warmup is None else self.warmup
        return max(needed, self.ddof + 1)

    def init(self, norm: Any) -> History:
        return _empty(norm, self.window)

    def update(self, seen: Seen, memory: History) -> tuple[Any, History]:
        def bound(ring: jax.Array) -> jax.Array:
            mean, deviation = _mean_and_deviation(ring, memory.num_known, self.ddof)
            # Of equal norms the next is clipped at a hair above them, not at them.
            found = mean + like(self.k, mean) * jnp.maximum(
                deviation, jnp.abs(mean) * 1e-6
            )
            return jnp.where(
                memory.num_known >= self._needed,
                found,
                jnp.full_like(found, jnp.inf),
            )

        return jax.tree.map(bound, memory.norms), _with(memory, seen.norm, self.window)


def _mean_and_deviation(
    ring: jax.Array, count: jax.Array, ddof: int
) -> tuple[jax.Array, jax.Array]:
    known = _known(ring, count)
    ring = jnp.where(known, ring, jnp.zeros_like(ring))
    # Of moduli: what is remembered may be a loss.
    peak = jnp.max(jnp.abs(ring), axis=0)
    # Relative to the largest: squares of norms above 1e19 would overflow.
    parts = _numerics.fraction(ring, peak)
    number = jnp.maximum(count, 1).astype(ring.dtype)
    mean = jnp.sum(parts, axis=0) / number
    apart = jnp.where(known, parts - mean[None], jnp.zeros_like(ring))
    freedom = jnp.maximum(count - ddof, 1).astype(ring.dtype)
    deviation = _numerics.root(jnp.sum(jnp.square(apart), axis=0) / freedom)
    return mean * peak, deviation * peak


def quantile(q: Number = 0.1, window: int = 1000) -> Quantile:
    r"""A quantile of the last norms, the current one among them.

    .. math:: c_t = \mathrm{quantile}_q(n_{t-window+1}, \ldots, n_t)

    Args:
      q: a scalar from 0 to 1, traced or not.
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
      >>> tx = optclip.clip_by_global_norm(optclip.thresholds.quantile(0.5))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 4.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [3.]
      [4.]

    Source: Seetharaman, Wichern, Pardo, Le Roux, *AutoClip: Adaptive Gradient Clipping
    for Source Separation Networks*, 2020, arXiv:2007.14469.
    """
    return Quantile(q, window)


def mean_plus_std(
    k: Number = 3.0, window: int = 128, warmup: int | None = None, ddof: int = 0
) -> MeanPlusStd:
    r"""The mean of the norms before this one plus k of their standard deviations.

    .. math:: c_t = \mathrm{mean} + k \cdot \mathrm{std}\quad
        \text{of } n_{t-window}, \ldots, n_{t-1}

    Args:
      k: a finite scalar of at least 0, traced or not.
      window: how many norms are kept, an int.
      warmup: with fewer norms than these nothing is clipped; None is half the window,
        at least 2.
      ddof: what is taken from their number in the variance, as in `numpy.std`: 1 as
        PyTorch does.

    Returns:
      A rule for any scope and norm. The norms are those before the clip, so that the
      threshold does not creep down.

    Raises:
      ValueError: `window` is shorter than `warmup` and `ddof` ask for.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            inf: nothing is clipped
    equal norms        a millionth of k above them
    zero norm          counts as any other
    NaN or inf norm    as for any other; it never enters the memory
    first step         inf: nothing is clipped
    this step's norm   is not in the window; it enters it unclipped
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.mean_plus_std(2.0, window=4)
      >>> tx = optclip.clip_by_global_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 4.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [4.]
      [5.]

    Source: `clip_update_by_historical_norm` of Levanter (marin-community/levanter),
    whose smallest deviation is an absolute 1e-6.
    """
    return MeanPlusStd(k, window, warmup, ddof)
