"""A running mean plus some deviations as the threshold of spikes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_like, select
from .._arrays._types import Number, PyTree
from . import _running
from ._rule import Seen

_MODES = ("reciprocal", "mean", "percentile")


class Moments(NamedTuple):
    """Running mean and standard deviation, and the number of norms in the warm-up."""

    mean: PyTree
    deviation: PyTree
    step: PyTree


class _Result(NamedTuple):
    limit: jax.Array
    mean: jax.Array
    deviation: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Zscore:
    """See `zscore`."""

    takes_vector: ClassVar[bool] = True
    learns_from_zeros: ClassVar[bool] = False

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
        ) -> _Result:
            spike_limit, is_spike = self._spike(norm, mean, deviation)
            is_spike = is_spike & (step >= self.warmup)
            most = as_like(self.max_norm, norm)
            limit = select(is_spike, jnp.minimum(spike_limit, most), most)
            clipped_norm = select(is_spike, spike_limit, norm)
            new_mean, new_deviation = self._moments(clipped_norm, mean, deviation, step)
            if self.skip_spikes:
                new_mean = select(is_spike, mean, new_mean)
                new_deviation = select(is_spike, deviation, new_deviation)
            new_step = jnp.minimum(step + 1, self.warmup)
            return _Result(limit, new_mean, new_deviation, new_step)

        results = _batching.each(limit_and_moments, seen.norm, *memory)
        limits, *moments = (
            jax.tree.map(lambda f, i=i: f[i], results, is_leaf=_is_result)
            for i in range(len(_Result._fields))
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


def _is_result(value: object) -> bool:
    return isinstance(value, _Result)


def zscore(
    z: Number = 2.5,
    decay: Number = 0.97,
    warmup: int = 25,
    mode: str = "reciprocal",
    max_norm: Number = float("inf"),
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
      max_norm: Maximum threshold, warm-up included.
      eps: Number added to the deviation in `s`.
      skip_spikes: Whether spikes leave mean and deviation unchanged.

    Returns:
      A rule with a memory of two floats and one count per norm.

    Edge cases:
      - Warm-up, and constant norms (`std = 0`): the threshold is `max_norm`.
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
        _validate.number("max_norm", max_norm), _validate.plain("eps", eps),
        _validate.flag("skip_spikes", skip_spikes),
    )  # fmt: skip
