"""Rules for single elements, based on past values of the element or its leaf."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _batching, _numerics, _validate
from .._arrays._numerics import as_like
from .._arrays._types import Number, PyTree
from . import _running
from ._rule import OfPositive, OfVector, Seen
from ._rules_of_rules import Of


class Running(NamedTuple):
    """A running quantity per norm, and the number of steps in it, per norm or leaf."""

    value: PyTree
    steps: PyTree


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """See `second_moment`."""

    theta: Number
    decay: Number
    warmup: int

    def init(self, norm: PyTree) -> Running:
        # One count per leaf, so that a leaf added later has its own warm-up.
        steps = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), norm)
        return Running(jax.tree.map(jnp.zeros_like, norm), steps)

    def update(self, seen: Seen, memory: Running) -> tuple[PyTree, Running]:
        steps = _running.as_counts(memory.steps)
        warm = _batching.each(lambda n: n >= self.warmup, steps, as_slices=False)

        def bound(root: jax.Array, warm: jax.Array) -> jax.Array:
            # An element without a gradient so far has v = 0. Its threshold is inf,
            # since a threshold of 0 would keep its updates at zero.
            has_moment = warm & (root > 0)
            threshold = jnp.sqrt(as_like(self.theta, root)) * root
            return jnp.where(has_moment, threshold, jnp.full_like(root, jnp.inf))

        thresholds = _batching.each(bound, memory.value, warm)

        def learn(root: jax.Array, clipped: jax.Array) -> jax.Array:
            weights = _running.weights(self.decay, root)
            return _running.root_mean_square(*weights, root, clipped)

        roots = _batching.each(learn, memory.value, seen.keep(thresholds))
        return thresholds, Running(roots, _batching.each(_numerics.counted, steps))


@dataclasses.dataclass(frozen=True)
class Mean(OfPositive):
    """Learn the debiased running mean, including this step; see `ema_of_max`."""

    decay: Number

    def init(self, norm: PyTree) -> Running:
        return Running(jax.tree.map(jnp.zeros_like, norm), _running.counts(norm))

    def update(self, seen: Seen, memory: Running) -> tuple[PyTree, Running]:
        memory = memory._replace(steps=_running.as_counts(memory.steps))

        def learn(norm: jax.Array, old: jax.Array, step: jax.Array) -> jax.Array:
            weights = _running.debiased_weights(self.decay, step, old)
            return _running.mean(*weights, old, norm)

        means = _batching.each(learn, seen.norm, *memory)
        limits = _running.threshold_of(seen, means, *memory)
        return limits, Running(means, _batching.each(_numerics.counted, memory.steps))


@dataclasses.dataclass(frozen=True)
class Moment(OfVector):
    """See `moment`."""

    power: Number
    decay: Number

    def init(self, norm: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        def learn(old: jax.Array, norm: jax.Array) -> jax.Array:
            old_weight, new_weight = _running.weights(self.decay, norm)
            power = as_like(self.power, norm)
            # Both norms are divided by the larger one, so that their powers stay in
            # range. The divisor is 1 where both are 0, which avoids 0 / 0.
            peak = jnp.maximum(old, norm)
            safe = jnp.where(peak > 0, peak, jnp.ones_like(peak))
            powers = (
                _numerics.power(_numerics.ratio(x, safe), power) for x in (old, norm)
            )
            mean = _running.mean(old_weight, new_weight, *powers)
            return peak * _numerics.power(mean, 1 / power)

        moments = _batching.each(learn, memory, seen.norm)
        return _running.threshold_of(seen, moments, memory, memory), moments


def second_moment(
    theta: Number = 5000.0, decay: Number = 0.999, warmup: int = 20
) -> SecondMoment:
    """Clip to a multiple of each element's running root mean square, as in SPAM.

    The threshold is `sqrt(theta * v)`; then `v = decay * v + (1 - decay) * u**2` with
    the clipped element `u`. It is inf for the first `warmup` steps of a leaf, and while
    `v` is 0, so that elements without earlier gradients can move; SPAM's code clips
    them to zero. Each leaf counts its own steps, those with a finite element.
    Zeros enter `v`, as in Adam.
    """
    return SecondMoment(
        _validate.plain("theta", theta), _validate.fraction("decay", decay),
        _validate.length("warmup", warmup, least=0),
    )  # fmt: skip


def ema_of_max(decay: Number = 0.999) -> Of:
    """Clip to the running average of each leaf's largest element (AdaClip).

    The threshold is `m / (1 - decay**t)` in step `t`, counted from 1, where
    `m = decay * m + (1 - decay) * max(|u|)` includes this step. A leaf of zeros, or
    with a non-finite element, does not enter its average.
    """
    return Of(Mean(_validate.fraction("decay", decay)), "max")


def moment(power: Number = 1.0, decay: Number = 0.99) -> Moment:
    """Clip to the running power mean of each element's modulus.

    The threshold `c` includes this step, except in `skip`:
    `c**p = decay * c**p + (1 - decay) * |u|**p`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(optclip.thresholds.moment(decay=0.5))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (2.0, 2.0, 20.0):
      ...     clipped, state = tx.update(jnp.array([size]), state)
      ...     print(clipped)
      [1.]
      [1.5]
      [10.75]

    Args:
      power: Power `p` of the mean, above 0.
      decay: Decay of the mean, from 0 to below 1.

    Returns:
      A rule for `over="element"`; its memory is as large as the parameters, in float32.
      `c` starts at 0, so the first thresholds are small. Zeros enter `c`, as in Adam. A
      non-finite element keeps its own `c`; it counts as 0 in the step's threshold.

    See Also:
      `recipes.acclip`.

    References:
      Zhang et al., 2020, arXiv:1912.03194, ACClip.
    """
    _validate.plain("power", power, above=True)
    _validate.fraction("decay", decay)
    _validate.forgets("decay", decay)
    return Moment(power, decay)
