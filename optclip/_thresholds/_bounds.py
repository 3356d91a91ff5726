"""Separate lower and upper thresholds for elements."""

from __future__ import annotations

import dataclasses
import math

from .._arrays import _validate
from ._rule import ThresholdTree
from ._threshold_argument import as_rules


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Hold a lower and an upper threshold for elements; create it with `bounds(...)`.

    Args:
      lower: Lower bound, of any sign. Default: None, no bound.
      upper: Upper bound, of any sign. Default: None, no bound.
    """

    lower: ThresholdTree | None = None
    upper: ThresholdTree | None = None

    def __post_init__(self) -> None:
        lower = as_rules("lower", self.lower, negative=True, none=-math.inf)
        upper = as_rules("upper", self.upper, negative=True)
        _validate.ordered(self.lower, self.upper)
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)


def bounds(
    lower: ThresholdTree | None = None, upper: ThresholdTree | None = None
) -> Bounds:
    """Bound elements by separate lower and upper thresholds.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> bounds = optclip.thresholds.bounds(-1.0, 2.0)
      >>> tx = optclip.clip_by(bounds, over="element")
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  2. ]

    Args:
      lower: Lower bound of any sign: a number, array that broadcasts to each leaf,
        optax schedule, rule, or prefix tree of these. Default: None, unbounded.
      upper: Upper bound of any sign, in the same forms. Default: None, unbounded.

    Returns:
      A threshold for `clip_by(..., over="element")` with the response `"hard"`,
      `"drop"`, `"normalize"` or one that defines `element(x, lower, upper)`.

    Raises:
      ValueError: A bound is NaN, or `lower > upper`.
    """
    return Bounds(lower, upper)
