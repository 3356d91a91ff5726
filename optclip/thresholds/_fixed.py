"""The thresholds that are known from the step alone: numbers and schedules."""

import abc
import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax

from optclip._arrays import _validate
from optclip._arrays._types import Number, PyTree
from optclip.thresholds._rule import Seen


class _WithoutMemory(abc.ABC):
    """A rule that depends on the step alone."""

    @abc.abstractmethod
    def at(self, step: jax.Array) -> Number:
        """Return the threshold in a step."""

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[Number, PyTree]:
        return self.at(seen.step), memory


@dataclasses.dataclass(frozen=True)
class Constant(_WithoutMemory):
    """The threshold that never changes; numbers and arrays mean this."""

    value: Number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> float | tuple[int]:
        # Arrays are not compared: they may be traced.
        value = self.value
        return float(value) if isinstance(value, numbers.Real) else (id(value),)

    def at(self, step: jax.Array) -> Number:
        del step
        return self.value


@dataclasses.dataclass(frozen=True)
class Schedule(_WithoutMemory):
    """The threshold that an optax schedule gives for the step; callables mean this."""

    function: Callable[[jax.Array], Any]  # optax has other unions of number types.

    def at(self, step: jax.Array) -> Number:
        return self.function(step)


def constant(value: Number) -> Constant:
    """A fixed threshold, the rule that a plain number stands for.

    Args:
      value: a number or array of at least 0, traced or not; 0 clips to zero, inf
        measures and touches nothing.

    Raises:
      TypeError: `value` is not a real number or an array of them; a bool is not.
      ValueError: a concrete value is negative or NaN.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    any step or norm   `value`: there is no warm-up and no memory
    NaN or inf norm    the same; the clip's `nonfinite` says what is done
    ================== ==============================================================

    Example:
      >>> from optclip import thresholds
      >>> thresholds.constant(1.0)
      Constant(value=1.0)
    """
    _validate.number("value", value)
    # jax takes no Python int past 32 bits.
    return Constant(float(value) if isinstance(value, int) else value)


def schedule(function: Callable[[jax.Array], Any]) -> Schedule:
    """A threshold by an optax schedule, the rule that a plain callable stands for.

    Args:
      function: takes the step, an int32 scalar from 0 up, returns the threshold.

    Raises:
      TypeError: `function` is not a function.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first step         `function(0)`
    zero norm          as for any other
    NaN or inf norm    as for any other; the step counts
    ================== ==============================================================

    Example:
      >>> import optax
      >>> from optclip import thresholds
      >>> warm = thresholds.schedule(optax.linear_schedule(10.0, 1.0, 100))
      >>> print(warm.function(50))
      5.5
    """
    wanted = "an optax schedule, which is a function of the step"
    _validate.kind(
        "function", function, Callable, wanted, "A number is a threshold by itself."
    )
    return Schedule(function)
