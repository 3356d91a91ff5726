"""Keep norms within a band, which enlarges small norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _validate
from optclip._arrays._numerics import as_array, ratio
from optclip._arrays._types import Number, NumberOrSchedule


@dataclasses.dataclass(frozen=True)
class Band:
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
        if not callable(self.low):
            _validate.plain("low", self.low)
        _validate.plain("min_norm", self.min_norm)
        _validate.fraction("max_shrink", self.max_shrink)
        advice = "Pass 1 to forbid growth, inf for no limit."
        _validate.number("max_growth", self.max_growth, advice=advice)

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
