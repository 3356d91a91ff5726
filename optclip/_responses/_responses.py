"""Compute the coefficient of a norm: scale down, smooth, normalize, drop, band."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _collectives, _validate
from .._arrays._numerics import (
    as_array,
    broadcast_like,
    fraction_of_peak,
    power,
    promotable,
    ratio,
    select,
)
from .._arrays._types import Number, NumberOrSchedule


class Response(Protocol):
    """Compute the coefficient of a norm from the norm and its threshold."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array, /) -> Number: ...


class BaseResponse(abc.ABC):
    """Describe a response to the code that runs it; users' responses are converted.

    Attributes:
      compares_norms: Whether it also reads the other norms of the same leaf.
      signed: Whether its threshold is a parameter that may be negative, as an exponent.
    """

    compares_norms: ClassVar[bool] = False
    signed: bool = False

    @abc.abstractmethod
    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> Number:
        """Return the factor of the elements that share the norm."""

    def at(self, step: jax.Array | np.ndarray) -> Self:
        """Return the response at a step, with the values of its schedules."""
        return self


@dataclasses.dataclass(frozen=True)
class Hard(BaseResponse):
    """Scale down to the threshold: `min(1, c / n)`. The default."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        # A NaN threshold makes this False and the quotient NaN, so that it is visible.
        inside = norm <= threshold
        one = jnp.ones_like(norm)
        return select(inside, one, ratio(threshold, select(inside, one, norm)))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return `x` clipped exactly to the bounds; `lower` where `lower > upper`."""
        upper = jnp.where(upper < lower, lower, upper)
        clipped = jnp.where(x < lower, lower, jnp.where(x > upper, upper, x))
        # The bounds are in order unless one is NaN, which the maximum returns.
        return jnp.where(lower <= upper, clipped, jnp.maximum(lower, upper))


@dataclasses.dataclass(frozen=True)
class Smooth(BaseResponse):
    """Scale smoothly to below the threshold c: `(1 + (n / c) ** s) ** (-1 / s)`.

    With s = 2 the norm after clipping is `n / sqrt(1 + (n / c) ** 2)`, with s = 1
    `n / (1 + n / c)`; large s approach `Hard`. Norms below the threshold shrink too, by
    a fraction of about `(n / c) ** s / s`.

    Args:
      sharpness: The exponent s, a finite number above 0. Default: 2.
    """

    sharpness: Number = 2.0

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        s = promotable(self.sharpness)
        inside = norm <= threshold
        one, zero = jnp.ones_like(norm), jnp.zeros_like(norm)
        # Powers of a ratio of at most 1 cannot overflow. 0 / 0 is replaced before the
        # division, since a NaN in the unselected branch makes the derivative NaN.
        live = inside & (norm > 0)
        below = jnp.where(live, ratio(norm, jnp.where(live, threshold, one)), zero)
        above = jnp.where(inside, one, ratio(threshold, jnp.where(inside, one, norm)))
        small = jnp.where(live, (1 + power(below, s)) ** (-1 / s), one)
        return jnp.where(inside, small, above * (1 + power(above, s)) ** (-1 / s))


@dataclasses.dataclass(frozen=True)
class Normalize(BaseResponse):
    """Scale to the threshold, up or down: `c / n`. Zeros stay zeros.

    A threshold beyond the range of a leaf's dtype overflows in that leaf.
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        untouched = (norm == 0) | jnp.isinf(threshold)
        one = jnp.ones_like(norm)
        wanted = ratio(threshold, jnp.where(untouched, one, norm))
        # An infinite coefficient would make zeros NaN.
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        return jnp.where(untouched, one, jnp.minimum(wanted, largest))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return the bound on the side of each element; zeros stay zeros."""
        bound = jnp.where(x < 0, lower, jnp.where(x > 0, upper, x))
        return jnp.where(jnp.isinf(bound), x, bound)


@dataclasses.dataclass(frozen=True)
class Drop(BaseResponse):
    """Drop norms above the threshold: 0 if `n > c`, else 1."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        past = jnp.where(jnp.isnan(threshold), threshold, jnp.zeros_like(norm))
        return jnp.where(norm <= threshold, jnp.ones_like(norm), past)

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return 0 in place of elements outside the bounds."""
        # A NaN bound makes elements NaN, so that the error is visible.
        bound = jnp.where(jnp.isnan(lower), lower, upper)
        outside = jnp.where(jnp.isnan(bound), bound, jnp.zeros_like(x))
        return jnp.where((x >= lower) & (x <= upper), x, outside)


@dataclasses.dataclass(frozen=True)
class Tanh(BaseResponse):
    """Scale to `c * tanh(n / c)`, which never exceeds the threshold c."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        one = jnp.ones_like(norm)
        untouched = (norm == 0) | jnp.isinf(threshold)
        is_curved = ~untouched & (threshold > 0)
        multiple = ratio(
            jnp.where(is_curved, norm, one), jnp.where(is_curved, threshold, one)
        )
        # Below 2**-40 tanh(x) / x rounds to 1; the lower limit prevents 0 / 0.
        multiple = jnp.maximum(multiple, 2.0**-40)
        # At a threshold of 0 the coefficient is 0, at NaN it is NaN.
        edge = jnp.where(untouched, one, threshold)
        return jnp.where(is_curved, jnp.tanh(multiple) / multiple, edge)


@dataclasses.dataclass(frozen=True)
class Proportional(BaseResponse):
    """Scale all elements above the threshold by one factor, set by the largest.

    The coefficient is `c / max(n)` if `n > c`, and 1 otherwise, with the maximum over
    the leaf. Elements above the threshold keep their proportions and may become smaller
    than others below it. Designed for `clip_by_value`.

    References:
      Huang, Hu, et al., "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit
      Adam", 2025, arXiv:2502.17055v2.
    """

    compares_norms = True

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        one = jnp.ones_like(norm)
        past = ~(norm <= threshold)
        # A norm that is not finite follows its policy, and sets no factor for others.
        finite_norm = jnp.where(jnp.isfinite(norm), norm, jnp.zeros_like(norm))
        peak = broadcast_like(_collectives.largest_anywhere(finite_norm), norm)
        return jnp.where(past, ratio(threshold, jnp.where(past, peak, one)), one)

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return elements outside the bounds in proportion to the largest element."""
        # Bounds are symmetric here.
        size, limit = jnp.abs(x), upper
        finite = jnp.isfinite(size)
        finite_size = jnp.where(finite, size, jnp.zeros_like(size))
        proportion = fraction_of_peak(
            finite_size, _collectives.largest_anywhere(finite_size)
        )
        # An infinite element is set to its bound.
        proportion = jnp.where(finite, proportion, jnp.ones_like(proportion))
        moved = jnp.where(x < 0, -limit, limit) * proportion
        # A NaN bound makes the element NaN, so that the error is visible.
        is_nan = jnp.isnan(limit)
        return jnp.where((size > limit) | is_nan, jnp.where(is_nan, limit, moved), x)


@dataclasses.dataclass(frozen=True)
class Band(BaseResponse):
    """Keep norms within a band below the threshold. Use `band(...)`.

    Args:
      low: Lower edge as a fraction of the threshold, or an optax schedule of it.
      min_norm: Smallest lower edge, a scalar.
      max_shrink: Smallest coefficient, from 0 to 1.
      max_growth: Largest coefficient for norms below the band; 1 forbids growth.
    """

    low: Any  # A number, or a schedule until `at` is called.
    min_norm: Number = 0.0
    max_shrink: Number = 0.0
    max_growth: Number = float("inf")

    def __post_init__(self) -> None:
        _validate.plain_or_schedule("low", self.low)
        _validate.plain("min_norm", self.min_norm)
        _validate.fraction("max_shrink", self.max_shrink)
        _validate.number(
            "max_growth",
            self.max_growth,
            advice="Pass 1 to forbid growth, inf for no limit.",
        )

    def at(self, step: jax.Array | np.ndarray) -> Band:
        """Return the band of a step, with the value of the schedule `low`."""
        if not callable(self.low):
            return self
        return dataclasses.replace(self, low=self.low(step))

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        low, min_norm, shrink, growth = (
            as_array(value).astype(norm.dtype)
            for value in (self.low, self.min_norm, self.max_shrink, self.max_growth)
        )
        one = jnp.ones_like(norm)
        untouched = (norm == 0) | jnp.isinf(threshold)
        # A norm of 0 and an infinite threshold are replaced by 1, since 0 / 0 or
        # inf / inf in the unselected branch makes the derivative NaN.
        safe = jnp.where(untouched, one, norm)
        bounded = jnp.where(untouched, one, threshold)
        shrunk = jnp.maximum(ratio(bounded, safe), shrink)
        edge = jnp.maximum(low * bounded, min_norm)
        # An infinite coefficient would make zeros NaN.
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        grown = jnp.minimum(ratio(edge, safe), jnp.minimum(growth, largest))
        inside = jnp.where(safe < edge, jnp.maximum(grown, one), one)
        return jnp.where(untouched, one, jnp.where(safe <= bounded, inside, shrunk))


def band(
    low: NumberOrSchedule = 0.5,
    *,
    min_norm: Number = 0.0,
    max_shrink: Number = 0.0,
    max_growth: Number = float("inf"),
) -> Band:
    """Keep norms within a band: from `low * c` to the threshold c.

    Norms n above c are multiplied by `max(c / n, max_shrink)`. Norms below the lower
    edge `l = max(low * c, min_norm)` are multiplied by
    `max(1, min(l / n, max_growth))`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(2.0, response=optclip.responses.band(0.5))
      >>> updates = [jnp.array([3.0, 4.0]), jnp.array([1.5]), jnp.array([0.1])]
      >>> print(*tx.update(updates, tx.init(updates))[0])
      [1.2 1.6] [1.5] [1.]

    Args:
      low: Lower edge as a fraction of the threshold, or an optax schedule of it. Above
        1, small norms grow past the threshold.
      min_norm: Smallest lower edge, a scalar. Default: 0.
      max_shrink: Smallest coefficient, from 0 to 1; above 0, clipped norms may stay
        above the threshold. Default: 0.
      max_growth: Largest coefficient for norms below the band; 1 forbids growth.
        Default: inf.

    Returns:
      A response. Zeros stay zeros, and a threshold of inf has no effect.

    References:
      Li, Wu and Chang, "AGGC: Adaptive Group Gradient Clipping for Stabilizing Large
      Language Model Training", 2026, arXiv:2601.11864.
    """
    return Band(low, min_norm, max_shrink, max_growth)
