"""The threshold for spikes: the running mean plus some deviations."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _batching, _validate
from optclip._arrays._numerics import select
from optclip._arrays._types import Number, PyTree
from optclip.thresholds import _running
from optclip.thresholds._rule import Seen, like

_MODES = ("reciprocal", "mean", "percentile")


class Moments(NamedTuple):
    """Running mean and standard deviation, and the steps of warm-up taken."""

    mean: PyTree
    deviation: PyTree
    step: jax.Array


class _Result(NamedTuple):
    limit: jax.Array
    mean: jax.Array
    deviation: jax.Array


@dataclasses.dataclass(frozen=True)
class Zscore:
    """See `zscore`."""

    takes_vector: ClassVar[bool] = True

    z: Number
    decay: Number
    warmup: int
    mode: str
    max_norm: Number
    eps: Number
    skip_spikes: bool

    def __post_init__(self) -> None:
        _validate.plain("z", self.z, above=True)
        _validate.fraction("decay", self.decay)
        _validate.length("warmup", self.warmup)
        _validate.choice("mode", self.mode, _MODES)
        _validate.number("max_norm", self.max_norm)
        _validate.plain("eps", self.eps)
        _validate.flag("skip_spikes", self.skip_spikes)

    def init(self, norm: PyTree) -> Moments:
        return Moments(*_running.zeros(norm), jnp.zeros((), jnp.int32))

    def update(self, seen: Seen, memory: Moments) -> tuple[PyTree, Moments]:
        warm = memory.step >= self.warmup

        def limit_and_moments(
            norm: jax.Array, mean: jax.Array, deviation: jax.Array
        ) -> _Result:
            spike_limit, is_spike = self._spike(norm, mean, deviation)
            is_spike = is_spike & warm
            most = like(self.max_norm, norm)
            limit = select(is_spike, jnp.minimum(spike_limit, most), most)
            clipped_norm = select(is_spike, spike_limit, norm)
            moments = self._moments(clipped_norm, mean, deviation, memory.step)
            if self.skip_spikes:
                old = mean, deviation
                moments = (
                    select(is_spike, *pair) for pair in zip(old, moments, strict=True)
                )
            return _Result(limit, *moments)

        results = _batching.each(
            limit_and_moments, seen.norm, memory.mean, memory.deviation
        )
        limits, means, deviations = (
            jax.tree.map(lambda f, i=i: f[i], results, is_leaf=_is_result)
            for i in range(3)
        )
        step = jnp.minimum(memory.step + 1, self.warmup)
        return limits, Moments(means, deviations, step)

    def _spike(
        self, norm: jax.Array, mean: jax.Array, deviation: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the limit of a spike, and whether the norm is one."""
        z = like(self.z, norm)
        if self.mode == "percentile":
            edge = mean + z * deviation
            return edge, (norm > edge) & (deviation > 0)
        divisor = deviation + like(self.eps, norm)
        # After equal norms the deviation is 0, and every other norm would be a spike.
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
        # After zeros alone this norm is the first: a leaf may get gradients late.
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
    r"""Spikes, norms more than z deviations above the running mean, are clipped.

    .. math:: s = \frac{n - \mu}{\sigma + eps}, \qquad
        c = \mu + z\sigma \cdot \frac{z}{s} \text{ if } s > z \text{, else } \infty

    After that :math:`\mu` and :math:`\sigma^2` move by `1 - decay` towards the norm, of
    a spike towards c, and the square of its distance from the new :math:`\mu`.

    Args:
      z: a finite scalar above 0, traced or not.
      decay: a scalar from 0 to 1, traced or not.
      warmup: the number of first norms, whose mean and deviation the running ones start
        from, an int above 0.
      mode: where a spike is clipped to: `"reciprocal"`, by the formula above, the
        higher the lower; `"mean"`, :math:`\mu`; `"percentile"`,
        :math:`\mu + z\sigma`, and what is above that is a spike.
      max_norm: a number of at least 0 that no threshold is above, in the warm-up too.
      eps: what is added to the deviation in the formula: a finite scalar of at least 0.
      skip_spikes: whether mean and deviation stay as they are at a spike.

    Returns:
      A rule for any scope and norm; its memory is two floats for each norm.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            `max_norm`
    first step         `max_norm`
    this step's norm   is not in mean and deviation; it enters after, a spike clipped
    equal norms only   `max_norm`: as long as :math:`\sigma` is 0 nothing is known
    zero norm          counts as any other; after zeros alone a norm is the first
    NaN or inf norm    as of a norm of 0; it never enters the memory
    ================== ==============================================================

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

    Source: Kumar, Owen, Chowdhury, Güra, *ZClip: Adaptive Spike Mitigation for LLM
    Pre-Training*, 2025, arXiv:2504.02507; `max_norm` and modes from its code.
    """
    return Zscore(z, decay, warmup, mode, max_norm, eps, skip_spikes)
