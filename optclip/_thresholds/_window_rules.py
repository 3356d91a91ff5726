"""Rules that learn from a window of the last norms: a quantile, mean and deviation."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import _numerics, _placement, _validate
from .._arrays._numerics import as_like
from .._arrays._types import Number, PyTree
from . import _ranks, _running
from ._rule import OfPositive, Seen


class Window(NamedTuple):
    """A ring buffer of the last norms: per norm an array with the window as last axis.

    Per norm, `next` is the index of the next one, and `num_known` the number of stored
    ones, since a norm that is zero or not finite is not stored.
    """

    norms: PyTree
    next: PyTree
    num_known: PyTree


def _empty(norm: PyTree, length: int) -> Window:
    """Return an empty window for `length` norms."""

    def ring(x: jax.Array) -> jax.Array:
        # The broadcast keeps the placement of slices on Explicit axes.
        return jnp.broadcast_to(jnp.zeros_like(x)[..., None], (*x.shape, length))

    # Each counter has its own array, since an array used twice cannot be donated.
    return Window(
        jax.tree.map(ring, norm), _running.counts(norm), _running.counts(norm)
    )


def _with_integers(window: Window) -> Window:
    """Return the window with counts as integers, which a state may hold as floats."""
    return window._replace(
        next=_running.as_counts(window.next),
        num_known=_running.as_counts(window.num_known),
    )


def _with_norms(window: Window, norm: PyTree, length: int) -> Window:
    """Return the window after one more step, whose norms replace the oldest.

    Raises:
      ValueError: The window has another length.
    """
    lengths = {jnp.shape(ring)[-1] for ring in jax.tree.leaves(window.norms)}
    _validate.require(
        "window", length, lengths <= {length},
        f"{max(lengths, default=0)}, the number of norms in the state",
        "Pass the window that made the state, or create a new state with init.",
    )  # fmt: skip

    def with_last(ring: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        # A restored checkpoint may have NumPy arrays.
        ring = jnp.asarray(ring)
        # Each norm has its own index, so the entry is selected, not indexed. Its dtype
        # may be wider, as in a step under x64.
        here = _places(ring) == _along(index, ring)
        return jnp.where(here, _along(x.astype(ring.dtype), ring), ring)

    return Window(
        jax.tree.map(with_last, window.norms, norm, window.next),
        jax.tree.map(lambda index: (index + 1) % length, window.next),
        jax.tree.map(lambda n: jnp.minimum(n + 1, length), window.num_known),
    )


def _is_known(ring: jax.Array, count: jax.Array) -> jax.Array:
    """Return which entries hold a norm; `count` is one per norm."""
    return _places(ring) < _along(count, ring)


def _places(ring: jax.Array) -> jax.Array:
    """Return the index along the window, in the shape of the ring."""
    index = lax.broadcasted_iota(jnp.int32, ring.shape, ring.ndim - 1)
    return _placement.placed_as(index, ring)


def _along(number: jax.Array, ring: jax.Array) -> jax.Array:
    """Broadcast one number per norm along the window."""
    broadcast = jnp.broadcast_to(jnp.expand_dims(number, -1), ring.shape)
    return _placement.placed_as(broadcast, ring)


def _interpolated(
    ring: jax.Array, count: jax.Array, low: jax.Array, fraction: jax.Array
) -> jax.Array:
    """Return the number at a place among the `count` stored norms, in their order.

    It lies the fraction `fraction` of the way from the index `low` to the next.
    """
    # The largest number stands for a missing norm, since inf - inf would trip
    # jax.debug_nans.
    largest = jnp.full_like(ring, jnp.finfo(ring.dtype).max)
    ring = jnp.where(_is_known(ring, count), ring, largest)
    high = jnp.minimum(low + 1, jnp.maximum(count - 1, 0))
    a, b = of_ranks(ring, low, high)
    is_known = _placement.placed_as(count > 0, a)
    return jnp.where(is_known, a + (b - a) * fraction, jnp.full_like(a, jnp.inf))


# Compiled, so that an eager call does not compile a choice of platform each time.
@jax.custom_jvp
@jax.jit
def of_ranks(ring: jax.Array, *ranks: jax.Array) -> tuple[jax.Array, ...]:
    """Return the numbers of a rank and of it or the next, along the last axis.

    On a CPU, a sort of 1,000 norms takes eight times as long as a bisection. On a GPU,
    a sort takes a few kernels and no loop.
    """
    return lax.platform_dependent(ring, *ranks, cpu=_bisected, default=_sorted)


@of_ranks.defjvp
def _ranks_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    # The derivative selects the same norms as a sort, also among equal ones.
    return of_ranks(*primals), jax.jvp(_sorted, primals, tangents)[1]


def _bisected(
    ring: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    total = functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
    least = functools.partial(jnp.min, axis=-1)
    along = functools.partial(_along, ring=ring)
    a, b = _ranks.neighbors(ring, low, total, least, along, signed=True)
    return a, jnp.where(high > low, b, a)


def _sorted(ring: jax.Array, *ranks: jax.Array) -> tuple[jax.Array, ...]:
    ordered, places = jnp.sort(ring, axis=-1), _places(ring)

    def at(index: jax.Array) -> jax.Array:
        # A masked sum selects the entry, since indexing requires an output sharding on
        # a mesh with Explicit axes.
        here = places == _along(index, ring)
        return jnp.sum(jnp.where(here, ordered, jnp.zeros_like(ordered)), axis=-1)

    return tuple(map(at, ranks))


@dataclasses.dataclass(frozen=True)
class Quantile(OfPositive):
    """See `quantile`."""

    q: Number
    window: int

    def init(self, norm: PyTree) -> Window:
        return _empty(norm, self.window)

    def update(self, seen: Seen, memory: Window) -> tuple[PyTree, Window]:
        memory = _with_integers(memory)
        new = _with_norms(memory, seen.norm, self.window)

        def among(
            ring: jax.Array,
            old: jax.Array,
            included: jax.Array,
            *counts: jax.Array,
        ) -> jax.Array:
            # A non-finite norm is excluded from its own threshold. The policy
            # `nonfinite` then decides about the updates.
            ring = jnp.where(_along(included, ring), ring, old)
            count = jnp.where(included, *counts)
            return _interpolated(ring, count, *self._place(count, ring.dtype))

        included = jax.tree.map(
            lambda x: x if seen.includes_norm else jnp.zeros_like(x), seen.finite
        )
        thresholds = jax.tree.map(
            among, new.norms, memory.norms, included, new.num_known, memory.num_known
        )
        return thresholds, new

    def _place(self, count: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        """Return the place of the quantile, an index and the fraction after it."""
        q = _validate.concrete(self.q)
        if q is None:
            last = jnp.maximum(count - 1, 0).astype(dtype)
            place = jnp.asarray(self.q).astype(dtype) * last
            low = jnp.floor(place)
            return low.astype(jnp.int32), place - low
        # Positions are computed in float64: between two very different norms, a
        # rounding error in the position would be a visible error of the quantile.
        places = float(q) * np.arange(-1, self.window).clip(0)
        low, fraction = np.floor(places), places - np.floor(places)
        low = _looked_up(low.astype(np.int32), count)
        return low, _looked_up(fraction.astype(dtype), count)


def _looked_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Return entries of a table; a masked sum, as in `_sorted`."""
    rows = jnp.broadcast_to(table, (*index.shape, len(table)))
    rows = _placement.placed_as(rows, index[..., None])
    here = _places(rows) == _along(index, rows)
    return jnp.sum(jnp.where(here, rows, jnp.zeros_like(rows)), -1, dtype=rows.dtype)


def quantile(q: Number = 0.1, window: int = 1000) -> Quantile:
    """Clip to a quantile of the last norms, including this one, except in `skip`.

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
      - First step: the threshold is its norm, so nothing is clipped; in `skip` inf.
      - Zero norm: enters the threshold of its step, and is not stored.
      - NaN or inf norm: the threshold is the quantile of the stored norms.

    See Also:
      `recipes.autoclip`.

    References:
      Seetharaman et al., *AutoClip*, 2020, arXiv:2007.14469.
    """
    return Quantile(_validate.fraction("q", q), _validate.length("window", window))


@dataclasses.dataclass(frozen=True)
class MeanPlusStd(OfPositive):
    """See `mean_plus_std`."""

    k: Number
    window: int
    needed: int  # The number of norms that the first finite threshold requires.
    ddof: int
    log: bool

    def init(self, norm: PyTree) -> Window:
        return _empty(norm, self.window)

    def update(self, seen: Seen, memory: Window) -> tuple[PyTree, Window]:
        memory = _with_integers(memory)

        def bound(ring: jax.Array, count: jax.Array) -> jax.Array:
            of = self._of_logs if self.log else self._of_norms
            threshold = of(ring, count)
            return jnp.where(
                count >= self.needed,
                threshold,
                jnp.full_like(threshold, jnp.inf),
            )

        thresholds = jax.tree.map(bound, memory.norms, memory.num_known)
        return thresholds, _with_norms(memory, seen.norm, self.window)

    # After equal norms the deviation is 0. The minimum of 1e-6 of the mean, or of a
    # norm, avoids clipping rounding errors.
    def _of_norms(self, ring: jax.Array, count: jax.Array) -> jax.Array:
        mean, deviation = _mean_and_deviation(ring, count, self.ddof)
        least = jnp.abs(mean) * 1e-6
        return mean + as_like(self.k, mean) * jnp.maximum(deviation, least)

    def _of_logs(self, ring: jax.Array, count: jax.Array) -> jax.Array:
        # A loss of at most 0 has no logarithm.
        ring = jnp.maximum(ring, jnp.finfo(ring.dtype).tiny)
        # Relative to the largest norm, the logarithms of equal norms are exactly 0.
        peak = jnp.max(ring, axis=-1)
        logs = _log_of_ratio(ring, _along(peak, ring))
        mean, deviation = _mean_and_deviation(logs, count, self.ddof)
        log = mean + as_like(self.k, mean) * jnp.maximum(deviation, 1e-6)
        # A third of the logarithm of any ratio of two floats is in the range of exp.
        third = jnp.exp(log / 3)
        return peak * third * third * third


def _log_of_ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `log(a / b)` of positive numbers whose ratio may be out of range."""
    (a, exponent_a), (b, exponent_b) = jnp.frexp(a), jnp.frexp(b)
    exponent = (exponent_a - exponent_b).astype(a.dtype)
    return jnp.log(a / b) + exponent * math.log(2)


def _mean_and_deviation(
    ring: jax.Array, count: jax.Array, ddof: int
) -> tuple[jax.Array, jax.Array]:
    is_filled = _is_known(ring, count)
    ring = jnp.where(is_filled, ring, jnp.zeros_like(ring))
    # The absolute value is needed for a loss in `skip`, which may be negative.
    peak = jnp.max(jnp.abs(ring), axis=-1)
    # Norms are divided by the largest, since squares of norms above 1e19 overflow.
    fractions = _numerics.fraction_of_peak(ring, peak[..., None])
    number = jnp.maximum(count, 1).astype(ring.dtype)
    mean = jnp.sum(fractions, axis=-1) / number
    offsets = jnp.where(is_filled, fractions - mean[..., None], jnp.zeros_like(ring))
    freedom = jnp.maximum(count - ddof, 1).astype(ring.dtype)
    deviation = _numerics.root(jnp.sum(jnp.square(offsets), axis=-1) / freedom)
    return mean * peak, deviation * peak


def mean_plus_std(
    k: Number = 3.0,
    window: int = 128,
    warmup: int | None = None,
    ddof: int = 0,
    *,
    log: bool = False,
) -> MeanPlusStd:
    """Clip to the mean of past norms plus k standard deviations.

    The threshold is `mean + k * std` of the last `window` unclipped norms before this
    step.

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

    Args:
      k: Number of standard deviations.
      window: Number of norms; an int.
      warmup: Number of norms before the first clipping. Default: half the window, at
        least 2.
      ddof: Number subtracted from the divisor of the variance, as in NumPy; PyTorch
        uses 1.
      log: Whether to use the logarithms: the threshold is then `exp(mean + k * std)`.
        Norms vary by factors, and one outlier raises this threshold less. For losses,
        only if they are above 0.

    Returns:
      A rule. The deviation is at least `1e-6 * mean`, or 1e-6 of logarithms,
      so that rounding errors of equal norms are not clipped.

    Edge cases:
      - Zero, NaN or inf norm: not stored.

    Raises:
      ValueError: `window` is too short for `warmup` and `ddof`.

    See Also:
      `recipes.mean_std_clip` and `recipes.olmo_skip`.

    References:
      Levanter (marin-community/levanter), `clip_update_by_historical_norm`, whose
      smallest deviation is 1e-6.
    """
    window = _validate.length("window", window)
    ddof = _validate.length("ddof", ddof, least=0)
    needed = max(2, window // 2)
    if warmup is not None:
        needed = _validate.length("warmup", warmup)
    needed = max(needed, ddof + 1)
    wanted = f"at least {needed} with warmup={warmup} and ddof={ddof}"
    advice = (
        "With fewer norms nothing would ever be clipped. Pass a longer window,"
        " or a smaller warmup or ddof."
    )
    _validate.require("window", window, needed <= window, wanted, advice)
    _validate.plain("k", k)
    return MeanPlusStd(k, window, needed, ddof, _validate.flag("log", log))
