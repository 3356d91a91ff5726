"""Thresholds for single elements, from what each of them, or its leaf, was before."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _batching, _collectives, _numerics, _validate
from optclip._arrays._types import Number, PyTree
from optclip.thresholds import _running
from optclip.thresholds._rule import Seen, like


class Running(NamedTuple):
    """A running quantity of each norm, and the number of norms in it."""

    value: PyTree
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """See `second_moment`."""

    takes_vector: ClassVar[bool] = True

    theta: Number
    decay: Number
    warmup: int

    def __post_init__(self) -> None:
        _validate.plain("theta", self.theta)
        _validate.fraction("decay", self.decay)
        _validate.length("warmup", self.warmup, least=0)

    def init(self, norm: PyTree) -> Running:
        return Running(jax.tree.map(jnp.zeros_like, norm), jnp.zeros((), jnp.int32))

    def update(self, seen: Seen, memory: Running) -> tuple[PyTree, Running]:
        warm = memory.steps >= self.warmup

        def bound(root: jax.Array) -> jax.Array:
            # An element without any gradient so far has v = 0. Its threshold is inf,
            # since a threshold of 0 would keep the element at zero.
            has_moment = warm & (root > 0)
            threshold = jnp.sqrt(like(self.theta, root)) * root
            return jnp.where(has_moment, threshold, jnp.full_like(root, jnp.inf))

        thresholds = _batching.each(bound, memory.value)

        def learn(root: jax.Array, left: jax.Array) -> jax.Array:
            weights = _running.weights(self.decay, root)
            return _running.root_mean_square(*weights, root, left)

        roots = _batching.each(learn, memory.value, seen.keep(thresholds))
        return thresholds, Running(roots, _numerics.counted(memory.steps))


@dataclasses.dataclass(frozen=True)
class EmaOfMax:
    """See `ema_of_max`."""

    decay: Number

    def __post_init__(self) -> None:
        _validate.fraction("decay", self.decay)

    def init(self, norm: PyTree) -> Running:
        zeros = jax.tree.map(lambda x: jnp.zeros((), x.dtype), norm)
        return Running(zeros, jnp.zeros((), jnp.int32))

    def update(self, seen: Seen, memory: Running) -> tuple[PyTree, Running]:
        def learn(old: jax.Array, norm: jax.Array) -> jax.Array:
            peak = jnp.maximum(_collectives.largest(norm), 0)
            weights = _running.debiased_weights(self.decay, memory.steps, old)
            return _running.mean(*weights, old, peak)

        averages = _batching.each(learn, memory.value, seen.norm)
        return averages, Running(averages, _numerics.counted(memory.steps))


@dataclasses.dataclass(frozen=True)
class Moment:
    """See `moment`."""

    takes_vector: ClassVar[bool] = True

    power: Number
    decay: Number

    def __post_init__(self) -> None:
        _validate.plain("power", self.power, above=True)
        _validate.fraction("decay", self.decay)
        _validate.forgets("decay", self.decay)

    def init(self, norm: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        def learn(old: jax.Array, norm: jax.Array) -> jax.Array:
            old_weight, new_weight = _running.weights(self.decay, norm)
            power = like(self.power, norm)
            # Powers are computed of fractions of the larger norm, so that they stay in
            # range. The divisor is 1 where both norms are 0, which keeps out 0 / 0.
            peak = jnp.maximum(old, norm)
            safe = jnp.where(peak > 0, peak, jnp.ones_like(peak))
            powers = (
                _numerics.power(_numerics.ratio(x, safe), power) for x in (old, norm)
            )
            mean = _running.mean(old_weight, new_weight, *powers)
            return peak * _numerics.power(mean, 1 / power)

        moments = _batching.each(learn, memory, seen.norm)
        return moments, moments


def second_moment(
    theta: Number = 5000.0, decay: Number = 0.999, warmup: int = 20
) -> SecondMoment:
    r"""A multiple of the running root mean square of each element.

    .. math:: c_t = \sqrt{\theta\, v_{t-1}}, \qquad
        v_t = decay \cdot v_{t-1} + (1 - decay) \cdot (\text{clipped } u_t)^2

    Args:
      theta: how many times its mean square the square of an element may be, a finite
        scalar of at least 0, traced or not.
      decay: a scalar from 0 to 1, traced or not: Adam's `b2`, for v to be Adam's.
      warmup: a number of steps in which nothing is clipped, an int of at least 0.

    Returns:
      A rule for any scope, made for `over="element"`: its memory there is as large as
      the parameters, in float32.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            inf: nothing is clipped
    first step         inf, without a warm-up too
    this step's norm   is not in v, which it enters clipped
    v = 0              inf: an element that had no gradient yet is not known
    zero element       counts as any other
    NaN or inf         as for any other; the step never enters the memory
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.second_moment(4.0, decay=0.5, warmup=1)
      >>> tx = optclip.clip_by_value(rule)
      >>> state = tx.init(jnp.zeros(2))
      >>> for u in ([2.0, 1.0], [9.0, 1.0]):
      ...     clipped, state = tx.update(jnp.array(u), state)
      ...     print(clipped)
      [2. 1.]
      [2.828427 1.      ]

    Source: Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
    Training*, 2025, arXiv:2501.06842; its code clips what had no gradient yet to zero.
    """
    return SecondMoment(theta, decay, warmup)


def ema_of_max(decay: Number = 0.999) -> EmaOfMax:
    r"""The running average of the largest element of each leaf.

    .. math:: c_t = \frac{m_t}{1 - decay^t}, \qquad
        m_t = decay \cdot m_{t-1} + (1 - decay) \cdot \max_i |u_{t,i}|

    Args:
      decay: a scalar from 0 to 1, traced or not.

    Returns:
      A rule made for element scope; its memory is a float a leaf.

    Raises:
      TypeError, ValueError: `decay` is not a number from 0 to 1.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            none
    first step         the largest element: nothing is clipped
    this step's norm   is in the average
    zero leaf          counts as any other
    NaN or inf         as if the element were 0; the step never enters the memory
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.ema_of_max(0.5)
      >>> tx = optclip.clip_by_value(rule, response="proportional")
      >>> state = tx.init(jnp.zeros(2))
      >>> for u in ([3.0, 1.0], [9.0, 1.0]):
      ...     clipped, state = tx.update(jnp.array(u), state)
      ...     print(clipped)
      [3. 1.]
      [7. 1.]

    Source: Huang et al., *Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit
    Adam*, 2025, arXiv:2502.17055, AdaClip.
    """
    return EmaOfMax(decay)


def moment(power: Number = 1.0, decay: Number = 0.99) -> Moment:
    r"""The running power mean of each element's modulus, this step's included.

    .. math:: c_t^p = decay \cdot c_{t-1}^p + (1 - decay) \cdot |u_t|^p

    Args:
      power: p, a finite scalar above 0, traced or not.
      decay: a scalar from 0 to below 1, or traced.

    Returns:
      A rule for any scope, made for `over="element"`: its memory there is as large as
      the parameters, in float32. It starts at 0, so the first thresholds are small.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            none: thresholds grow from 0
    first step         :math:`(1 - decay)^{1/p} |u|`
    this step's norm   is in the average
    zero element       counts as any other
    NaN or inf         as if it were 0; the step never enters the memory
    ================== ==============================================================

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

    Source: Zhang et al., *Why are Adaptive Methods Good for Attention Models?*, 2020,
    arXiv:1912.03194, ACClip.
    """
    return Moment(power, decay)
