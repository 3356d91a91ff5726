"""Rules that learn running averages: a multiple, a z-score, a ratio of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _batching, _collectives, _numerics, _validate, _xla
from .._arrays._numerics import as_like, counted, ratio, select
from .._arrays._packed_state import PerNorm
from .._arrays._types import Number, NumberOrSchedule, PyTree
from . import _running
from ._rule import OfPositive, OfVector, Seen

_STARTS = ("first", "debiased", "zero")


class Average(NamedTuple):
    """The running norm, inf before the first, and the number of norms in it."""

    norm: PyTree
    step: PyTree


@dataclasses.dataclass(frozen=True)
class Ema(OfPositive):
    """See `ema`."""

    ratio: NumberOrSchedule
    decay: Number
    warmup: int
    max_norm: Number
    start: str

    def init(self, norm: PyTree) -> Average:
        unknown = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), norm)
        return Average(unknown, _running.counts(norm))

    def update(self, seen: Seen, memory: Average) -> tuple[PyTree, Average]:
        memory = memory._replace(step=_running.as_counts(memory.step))
        ratio: Number = self.ratio(seen.step) if callable(self.ratio) else self.ratio
        early = self._common_limit(seen) if self.warmup > 0 else None

        def limit(norm: jax.Array, average: jax.Array, step: jax.Array) -> jax.Array:
            late = select(average < jnp.inf, as_like(ratio, average) * average, average)
            return select(step >= self.warmup, late, early(norm)) if early else late

        thresholds = _batching.each(limit, seen.norm, *memory)

        def learn(old: jax.Array, step: jax.Array, clipped: jax.Array) -> jax.Array:
            # A norm clipped to 0 is excluded: the average would decay to 0.
            return select(clipped > 0, self._averaged(old, clipped, step), old)

        norms = _batching.each(learn, *memory, seen.keep(thresholds))
        steps = _batching.each(_numerics.counted, memory.step)
        return thresholds, Average(norms, steps)

    def _common_limit(self, seen: Seen) -> Callable[[jax.Array], jax.Array]:
        """Build the function that limits norms to a total L2 norm of `max_norm`."""
        leaves = jax.tree.leaves(seen.norm)
        if not seen.includes_norm and [x.ndim for x in leaves] == [0]:
            return lambda norm: jnp.full_like(norm, self.max_norm)
        if isinstance(seen.norm, PerNorm):
            batched = _batching.Batched.of_vector(*leaves)
        else:
            batched = _batching.Batched(leaves)
        peak, total = _peak_and_total(batched)

        def bound(norm: jax.Array) -> jax.Array:
            limit = as_like(self.max_norm, norm)
            is_over = (_numerics.fraction_of_peak(limit, peak) < total) & (norm > 0)
            # The norm is divided first: limit / (peak * total) alone may underflow.
            common_limit = limit * (_numerics.fraction_of_peak(norm, peak) / total)
            return select(is_over, common_limit, jnp.full_like(norm, jnp.inf))

        return bound

    def _averaged(self, old: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        """Return the average, updated by one norm."""
        is_first = old == jnp.inf
        if self.start == "debiased":
            weights = _running.debiased_weights(self.decay, step, new)
        else:
            weights = _running.weights(self.decay, new)
        mixed = _running.mean(*weights, select(is_first, jnp.zeros_like(old), old), new)
        if self.start == "zero":
            return mixed
        if self.start == "first":
            mixed = select(step < self.warmup, jnp.minimum(old, new), mixed)
        return select(is_first, new, mixed)


def _peak_and_total(batched: _batching.Batched) -> tuple[jax.Array, jax.Array]:
    """Return the largest norm, and the L2 norm of all over the largest, at least 1."""
    if not batched.values:
        return jnp.ones(()), jnp.ones(())
    peaks = batched.map(lambda x: _collectives.largest_anywhere(x) if x.ndim else x)
    # Both results are materialized: otherwise XLA on CPU recomputes all norms for
    # each threshold.
    peak = _xla.materialized(_collectives.largest(_joined(peaks), None, 0.0))

    def square(x: jax.Array) -> jax.Array:
        squares = jnp.square(_numerics.fraction_of_peak(x, peak))
        if not x.ndim:
            return squares
        return _collectives.reduced_over(lax.psum, jnp.sum(squares))

    total = _numerics.root(jnp.sum(_joined(batched.map(square))))
    return peak, _xla.materialized(jnp.maximum(total, 1.0))


def _joined(batched: _batching.Batched) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in batched.values])


def ema(
    ratio: NumberOrSchedule = 1.05,
    decay: Number = 0.98,
    warmup: int = 100,
    max_norm: Number | None = 1.0,
    start: str = "first",
) -> Ema:
    """Clip to a multiple of the running average norm.

    The threshold is `ratio * mean`; then `mean = decay * mean + (1 - decay) * norm`
    with the clipped norm. During the warm-up a common factor clips all norms to a total
    L2 norm of `max_norm`: by default 1, in units of the norm, from which the average
    then grows by at most `(ratio - 1) * (1 - decay)` per step. Pass `max_norm=None` if
    usual norms exceed 1.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.ema(1.5, decay=0.5, warmup=0)
      >>> tx = optclip.clip_by_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 2.0, 30.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [2.]
      [3.]
      [3.75]

    Args:
      ratio: Threshold as a multiple of the average: a number or an optax schedule.
      decay: Decay of the average, from 0 to 1.
      warmup: Number of warm-up steps, counted per norm.
      max_norm: Maximum total norm during the warm-up; None clips nothing in it.
      start: Start of the average: `"first"`, the smallest norm of the warm-up, or
        without one the first norm; `"zero"`; or `"debiased"`, zero with Adam's bias
        correction.

    Returns:
      A rule, intended for leaves, with a memory of one float and one count per norm.

    Edge cases:
      - First step of a norm without warm-up: the threshold is inf.
      - Zero, NaN or inf norm: does not enter its average, and does not count as a step
        of its warm-up.

    See Also:
      `recipes.adagc`, `recipes.olmo_ratio` and `recipes.aggc`.

    References:
      Wang, Li, et al., *AdaGC*, 2025, arXiv:2502.11034, algorithm 1.
    """
    _validate.plain_or_schedule("ratio", ratio)
    _validate.fraction("decay", decay)
    if _validate.choice("start", start, _STARTS) == "zero":
        _validate.forgets("decay", decay)
    return Ema(
        ratio, decay, _validate.length("warmup", warmup, least=0),
        math.inf if max_norm is None else _validate.number("max_norm", max_norm), start,
    )  # fmt: skip


_MODES = ("reciprocal", "mean", "percentile")


class Moments(NamedTuple):
    """Running mean and standard deviation, and the number of norms in the warm-up."""

    mean: PyTree
    deviation: PyTree
    step: PyTree


@dataclasses.dataclass(frozen=True)
class Zscore(OfPositive):
    """See `zscore`."""

    z: Number
    decay: Number
    warmup: int
    mode: str
    max_norm: Number
    eps: Number
    skip_spikes: bool

    def init(self, norm: PyTree) -> Moments:
        return Moments(*_running.zeros(norm), _running.counts(norm))

    def update(self, seen: Seen, memory: Moments) -> tuple[PyTree, Moments]:
        memory = memory._replace(step=_running.as_counts(memory.step))

        def limit_and_moments(
            norm: jax.Array, mean: jax.Array, deviation: jax.Array, step: jax.Array
        ) -> tuple[jax.Array, ...]:
            spike_limit, is_spike = self._spike(norm, mean, deviation)
            is_spike = is_spike & (step >= self.warmup)
            most = as_like(self.max_norm, norm)
            limit = select(is_spike, jnp.minimum(spike_limit, most), most)
            if not seen.includes_norm:
                eps = as_like(0.0 if self.mode == "percentile" else self.eps, norm)
                edge = mean + as_like(self.z, norm) * (deviation + eps)
                is_known = (deviation > 0) & (step >= self.warmup)
                limit = select(is_known, jnp.minimum(edge, most), most)
            clipped_norm = select(is_spike, spike_limit, norm)
            new_mean, new_deviation = self._moments(clipped_norm, mean, deviation, step)
            if self.skip_spikes:
                new_mean = select(is_spike, mean, new_mean)
                new_deviation = select(is_spike, deviation, new_deviation)
            return limit, new_mean, new_deviation, jnp.minimum(step + 1, self.warmup)

        results = _batching.each(limit_and_moments, seen.norm, *memory)
        limits, *moments = (
            jax.tree.map(lambda _, result, i=i: result[i], seen.norm, results)
            for i in range(4)
        )
        return limits, Moments(*moments)

    def _spike(
        self, norm: jax.Array, mean: jax.Array, deviation: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the threshold of a spike, and whether the norm is one."""
        z = as_like(self.z, norm)
        if self.mode == "percentile":
            edge = mean + z * deviation
            return edge, (norm > edge) & (deviation > 0)
        divisor = deviation + as_like(self.eps, norm)
        # After equal norms the deviation is 0, and any larger norm would be a spike.
        is_known = deviation > 0
        safe = select(is_known, divisor, jnp.ones_like(divisor))
        score = select(is_known, (norm - mean) / safe, jnp.zeros_like(norm))
        if self.mode == "mean":
            return mean, score > z
        positive = select(score > z, score, z)
        return mean + z * deviation * (z / positive), score > z

    def _moments(
        self, norm: jax.Array, mean: jax.Array, deviation: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return mean and deviation; in the warm-up they cover all norms so far."""
        is_warm = step >= self.warmup
        first_weight = 1 / (step + 1).astype(norm.dtype)
        early = 1 - first_weight, first_weight
        late = _running.weights(self.decay, norm)
        old_weight, new_weight = (
            select(is_warm, *pair) for pair in zip(late, early, strict=True)
        )
        # A loss may be 0 throughout the warm-up. The next one then becomes the mean.
        is_first = is_warm & (mean == 0) & (deviation == 0)
        mean = select(is_first, norm, mean)
        new = _running.mean(old_weight, new_weight, mean, norm)
        # Deviations are averaged, since variances overflow for norms above 1e19.
        offset = select(is_warm, norm - new, (norm - mean) * jnp.sqrt(early[0]))
        return new, _running.root_mean_square(old_weight, new_weight, deviation, offset)


def zscore(
    z: Number = 2.5,
    decay: Number = 0.97,
    warmup: int = 25,
    mode: str = "reciprocal",
    max_norm: Number | None = None,
    eps: Number = 1e-6,
    skip_spikes: bool = False,
) -> Zscore:
    """Clip spikes: norms more than z deviations above the running mean.

    A norm with `s = (norm - mean) / (std + eps)` above `z` is a spike; its threshold is
    `mean + z**2 / s * std`. The norm, or a spike's threshold, then enters the running
    mean and variance with weight `1 - decay`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(optclip.thresholds.zscore(2.0, warmup=2))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 4.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(f"{clipped[0]:.2f}")
      2.00
      4.00
      3.15

    Args:
      z: z-score above which a norm is a spike.
      decay: Decay of the mean and variance, from 0 to 1.
      warmup: Number of first norms, whose mean and variance start the running ones.
      mode: Threshold of a spike: `"reciprocal"`, the formula above; `"mean"`; or
        `"percentile"`, `mean + z * std`, above which every norm is a spike.
      max_norm: Maximum threshold, warm-up included. Default: None, no maximum.
      eps: Number added to the deviation in `s`.
      skip_spikes: Whether spikes leave mean and deviation unchanged.

    Returns:
      A rule with a memory of two floats and one count per norm.

    Edge cases:
      - Warm-up, and constant norms (`std = 0`): the threshold is `max_norm`, or inf.
      - In `skip`: the threshold is `mean + z * (std + eps)`, and never reads the norm.
      - Zero, NaN or inf norm: does not enter mean and variance, and does not count as a
        step of the warm-up.
      - Huge norm in the warm-up: enters mean and variance, as in the authors' code. One
        of 3e5 before norms of about 1 hides spikes of 10 for 730 steps.
      - Lasting tenfold rise of the norms: they stay clipped to the old level, since the
        rule learns from clipped norms; with `"percentile"` for 30 steps only.

    See Also:
      `recipes.zclip`.

    References:
      Kumar et al., *ZClip*, 2025, arXiv:2504.02507; `max_norm` and modes from its code.
    """
    return Zscore(
        _validate.plain("z", z, above=True), _validate.fraction("decay", decay),
        _validate.length("warmup", warmup), _validate.choice("mode", mode, _MODES),
        math.inf if max_norm is None else _validate.number("max_norm", max_norm),
        _validate.plain("eps", eps),
        _validate.flag("skip_spikes", skip_spikes),
    )  # fmt: skip


class Averages(NamedTuple):
    """Running mean and root mean square, and the number of norms in them."""

    mean: PyTree
    rms: PyTree
    steps: PyTree


@dataclasses.dataclass(frozen=True)
class MeanOverRms(OfVector):
    """See `mean_over_rms`."""

    b1: Number
    b2: Number
    eps: Number

    def init(self, norm: PyTree) -> Averages:
        return Averages(*_running.zeros(norm), _running.counts(norm))

    def update(self, seen: Seen, memory: Averages) -> tuple[PyTree, Averages]:
        memory = memory._replace(steps=_running.as_counts(memory.steps))

        def average(old: jax.Array, norm: jax.Array, step: jax.Array) -> jax.Array:
            weights = _running.debiased_weights(self.b1, step, norm)
            return _running.mean(*weights, old, norm)

        def mean_square(old: jax.Array, norm: jax.Array, step: jax.Array) -> jax.Array:
            weights = _running.debiased_weights(self.b2, step, norm)
            return _running.root_mean_square(*weights, old, norm)

        mean = _batching.each(average, memory.mean, seen.norm, memory.steps)
        rms = _batching.each(mean_square, memory.rms, seen.norm, memory.steps)

        def bound(mean: jax.Array, rms: jax.Array) -> jax.Array:
            divisor = rms + as_like(self.eps, rms)
            return ratio(mean, jnp.where(divisor > 0, divisor, jnp.ones_like(divisor)))

        averages = (mean, rms) if seen.includes_norm else (memory.mean, memory.rms)
        bounds = _batching.each(bound, *averages)
        thresholds = _running.threshold_of(seen, bounds, bounds, memory.steps)
        return thresholds, Averages(mean, rms, _batching.each(counted, memory.steps))


def mean_over_rms(
    b1: Number = 0.7, b2: Number = 0.9, eps: Number = 1e-8
) -> MeanOverRms:
    """Divide the running mean of the norms by their running root mean square.

    The threshold is `m / (sqrt(v) + eps)` with the debiased running averages `m` of the
    norm and `v` of its square, this step included, except in `skip`. It is 1 for
    constant norms, and smaller after a spike. Use it with `over="leaf"` and
    `response="normalize"`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.mean_over_rms()
      >>> tx = optclip.clip_by(rule, over="leaf", response="normalize")
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (5.0, 5.0, 50.0, 5.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(f"{clipped[0]:.2f}")
      1.00
      1.00
      0.83
      0.67

    Args:
      b1: Decay of the mean, from 0 to 1.
      b2: Decay of the mean square, from 0 to 1.
      eps: Number added to the root mean square.

    Returns:
      A rule with a memory of two floats and one count per norm. The first threshold is
      1, or 0 for a norm of 0. Zeros enter both averages, as in Adam.

    See Also:
      `recipes.stable_spam`.

    References:
      Huang et al., *Stable-SPAM*, 2025, arXiv:2502.17055v2, AdaGN.
    """
    return MeanOverRms(
        _validate.fraction("b1", b1), _validate.fraction("b2", b2),
        _validate.plain("eps", eps),
    )  # fmt: skip
