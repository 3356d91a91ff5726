"""The running mean of the norms over their root mean square as the threshold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_like, counted, ratio
from .._arrays._types import Number, PyTree
from . import _running
from ._rule import Seen


class Averages(NamedTuple):
    """Running mean and root mean square, and the number of norms in them."""

    mean: PyTree
    rms: PyTree
    steps: PyTree


@dataclasses.dataclass(frozen=True)
class MeanOverRms:
    """See `mean_over_rms`."""

    takes_vector: ClassVar[bool] = True

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
            safe = jnp.where(divisor > 0, divisor, jnp.ones_like(divisor))
            return ratio(mean, safe)

        thresholds = _batching.each(bound, mean, rms)
        return thresholds, Averages(mean, rms, _batching.each(counted, memory.steps))


def mean_over_rms(
    b1: Number = 0.7, b2: Number = 0.9, eps: Number = 1e-8
) -> MeanOverRms:
    """Divide the running mean of the norms by their running root mean square.

    The threshold is `m / (sqrt(v) + eps)` with the debiased running averages `m` of the
    norm and `v` of its square, this step included. It is 1 for constant norms, and
    smaller after a spike. Use it with `over="leaf"` and `response="normalize"`.

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
