"""A rule's threshold times a factor, between a floor and a ceiling."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._numerics import as_array, as_like
from .._arrays._types import Number, NumberOrSchedule, PyTree
from ._rule import RuleOfRule, Seen, Threshold
from ._rule_results import checked_update
from ._threshold_argument import one_rule


@dataclasses.dataclass(frozen=True)
class Scaled(RuleOfRule):
    """See `scaled`."""

    factor: NumberOrSchedule
    low: NumberOrSchedule | None
    high: NumberOrSchedule | None

    def __post_init__(self) -> None:
        if not callable(self.factor):
            _validate.plain("factor", self.factor)
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and not callable(bound):
                _validate.number(name, bound, negative=True)
        low, high = (_validate.concrete(x) for x in (self.low, self.high))
        if _are_ordered(low, high):
            return
        raise ValueError(
            f"`low` must be at most `high`, got low={low} and high={high}. Swap them."
        )

    @property
    def is_stateless(self) -> bool:
        is_scheduled = any(map(callable, (self.factor, self.low, self.high)))
        return not is_scheduled and getattr(self.rule, "is_stateless", False)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        scale = functools.partial(self._scaled, seen.step)
        # A rule that learns from clipped norms must see the norms that are clipped: at
        # its own threshold, `ema` would shrink its average in each step.
        inner = seen._replace(keep=lambda t: seen.keep(jax.tree.map(scale, t)))
        threshold, new = checked_update("threshold", self.rule, inner, memory)
        return jax.tree.map(scale, threshold), new

    def _scaled(self, step: jax.Array, threshold: Number) -> jax.Array:
        out = as_array(threshold)

        def at_step(value: NumberOrSchedule) -> jax.Array:
            return as_like(value(step) if callable(value) else value, out)

        # Infinite thresholds clip nothing, and 0 * inf would be NaN.
        out = jnp.where(jnp.isinf(out), out, at_step(self.factor) * out)
        # A maximum and a minimum keep NaN.
        if self.low is not None:
            out = jnp.maximum(out, at_step(self.low))
        return out if self.high is None else jnp.minimum(out, at_step(self.high))


def _are_ordered(low: Any, high: Any) -> bool:
    numbers = [x for x in (low, high) if x is not None and x.dtype != object]
    return len(numbers) < 2 or bool(numbers[0] <= numbers[1])


def scaled(
    rule: Threshold,
    factor: NumberOrSchedule = 1.0,
    *,
    low: NumberOrSchedule | None = None,
    high: NumberOrSchedule | None = None,
) -> Scaled:
    """Multiply the threshold of a rule by a factor, and bound it.

    The threshold is `min(max(factor * threshold, low), high)`.

    Example:
      Clip to twice the median of the last norms, at least to 1 and at most to 5:

      >>> import jax.numpy as jnp, optclip
      >>> median = optclip.thresholds.quantile(0.5, window=100)
      >>> rule = optclip.thresholds.scaled(median, 2.0, low=1.0, high=5.0)
      >>> tx = optclip.clip_by_global_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.1, 1.5, 2.0, 50.0, 50.0, 50.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [0.1]
      [1.5]
      [2.]
      [3.5]
      [4.]
      [5.]

    Args:
      rule: The rule, number or optax schedule.
      factor: A number of at least 0, or an optax schedule of it.
      low: Smallest threshold: a number of any sign, or an optax schedule. Default:
        None, no bound.
      high: Largest threshold, in the same forms, also in warm-ups. Default: None.

    Returns:
      A rule with the memory of `rule`. It learns from norms clipped at the scaled
      threshold; rules that clip norms in another way, such as `zscore`, learn as alone.

    Edge cases:
      - Threshold inf, as in a warm-up: stays inf, unless `high` is given.
      - Negative threshold of a loss: a factor above 1 lowers it. Use `low` and `high`.

    Raises:
      ValueError: `low` is above `high`.
    """
    return Scaled(one_rule("rule", rule, negative=True), factor, low, high)
