"""A response that also lets small norms grow."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _validate
from optclip._arrays._numerics import ratio
from optclip._arrays._types import Number, NumberOrSchedule


@dataclasses.dataclass(frozen=True)
class Band:
    """Norms go to the near edge of a band below the threshold. Use `band(...)`.

    Args:
      low: the lower edge as a fraction of the threshold, or an optax schedule of it.
      min_norm: a scalar that the lower edge is never under.
      max_shrink: the smallest coefficient, from 0 to 1.
      max_growth: the largest coefficient, of at least 0; 1 lets no norm grow.
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
        advice = "1 lets no norm grow, inf bounds nothing."
        _validate.number("max_growth", self.max_growth, advice=advice)

    def at(self, step: jax.Array | np.ndarray) -> "Band":
        """The band of a step, with the number that the schedule `low` gives for it."""
        if not callable(self.low):
            return self
        return dataclasses.replace(self, low=self.low(step))

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        low, min_norm, shrink, growth = (
            jnp.asarray(value).astype(norm.dtype)
            for value in (self.low, self.min_norm, self.max_shrink, self.max_growth)
        )
        one = jnp.ones_like(norm)
        untouched = (norm == 0) | jnp.isinf(threshold)
        safe = jnp.where(untouched, one, norm)
        bounded = jnp.where(untouched, one, threshold)
        shrunk = jnp.maximum(ratio(bounded, safe), shrink)
        edge = jnp.maximum(low * bounded, min_norm)
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
) -> "Band":
    r"""Scale norms above the threshold c down to it, norms below `low * c` up to that.

    .. math:: k = \begin{cases} \max(c / n, max\_shrink) & n > c \\
        \min(l / n, max\_growth) & n < l = \max(low \cdot c, min\_norm) \\
        1 & \text{otherwise} \end{cases}

    Args:
      low: the lower edge as a fraction of the threshold, or an optax schedule of it;
        above 1 all norms below the threshold grow.
      min_norm: a scalar that the lower edge is never under.
      max_shrink: the smallest coefficient, from 0 to 1; above 0 the norm that is left
        may be above the threshold.
      max_growth: the largest coefficient, of at least 0; 1 lets no norm grow.

    Returns:
      A response. Zeros stay zeros, and a threshold of inf touches nothing.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_norm(2.0, response=optclip.responses.band(0.5))
      >>> updates = [jnp.array([3.0, 4.0]), jnp.array([1.5]), jnp.array([0.1])]
      >>> print(*tx.update(updates, tx.init(updates))[0])
      [1.2 1.6] [1.5] [1.]

    Source: Li, Wu, Chang, *AGGC: Adaptive Group Gradient Clipping for Stabilizing Large
    Language Model Training*, 2026, arXiv:2601.11864.
    """
    return Band(low, min_norm, max_shrink, max_growth)
