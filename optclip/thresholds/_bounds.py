"""Two thresholds for elements, one on each side."""

import dataclasses
import math

from optclip._arrays import _validate
from optclip.thresholds._rule import ThresholdTree
from optclip.thresholds._threshold_argument import as_rules


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Two thresholds for elements, one on each side. Use `bounds(...)`.

    Args:
      lower: the lower bound, of any sign; None is no bound.
      upper: the upper bound, of any sign; None is no bound.
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
    """Two bounds for elements, in place of a symmetric threshold.

    Args:
      lower: the lower bound, of any sign: a number, an array that broadcasts to each
        leaf, an optax schedule, a rule, or a prefix tree of these; None is no bound.
      upper: the upper bound, of any sign: a number, an array that broadcasts to each
        leaf, an optax schedule, a rule, or a prefix tree of these; None is no bound.

    Returns:
      A threshold for `clip_by(..., over="element")`.

    Raises:
      TypeError: a bound is not a number or an array of numbers.
      ValueError: a bound is NaN; or both are concrete numbers and `lower > upper`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> bounds = optclip.thresholds.bounds(-1.0, 2.0)
      >>> tx = optclip.clip_by(bounds, over="element")
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  2. ]
    """
    return Bounds(lower, upper)
