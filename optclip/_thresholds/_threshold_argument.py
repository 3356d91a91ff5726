"""Conversion of a threshold argument to rules, of which fixed ones are defined here."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import jax

from .._arrays import _validate
from .._arrays._types import Number, PyTree
from ._rule import (
    Rule,
    Seen,
    Threshold,
    ThresholdTree,
    WithoutMemory,
    is_rule,
    is_transformation,
)


class _Fixed(WithoutMemory, abc.ABC):
    """A rule that depends only on the step."""

    @abc.abstractmethod
    def at(self, step: jax.Array) -> Number:
        """Return the threshold at a step."""

    def update(self, seen: Seen, memory: PyTree) -> tuple[Number, PyTree]:
        return self.at(seen.step), memory


@dataclasses.dataclass(frozen=True, eq=False)
class Constant(_Fixed):
    """A fixed threshold; numbers and arrays are converted to it."""

    is_stateless: ClassVar[bool] = True

    value: Number

    def at(self, step: jax.Array) -> Number:
        return self.value


@dataclasses.dataclass(frozen=True)
class Schedule(_Fixed):
    """A threshold that follows an optax schedule; callables are converted to it."""

    function: Callable[[jax.Array], Any]  # optax has other unions of number types.

    def at(self, step: jax.Array) -> Number:
        return self.function(step)


@dataclasses.dataclass(frozen=True)
class Named:
    """A threshold, with the argument and the function that errors must name."""

    name: str
    value: ThresholdTree
    function: str = "clip_by"


_WANTED = (
    "a number, an array, an optax schedule, a rule with init(norm) and update(seen,"
    " memory), or for leaf and group scope a tree of these"
)
# Modules whose functions return rules, and transformations.
# Found from this module's own name, so that a copy of the package under another name
# recognizes its functions.
_PACKAGE = __name__.rsplit(".", 2)[0]
_RULES, _RECIPES = f"{_PACKAGE}._thresholds.", f"{_PACKAGE}._recipes."


def as_named(threshold: ThresholdTree | Named) -> Named:
    """Return a threshold with its name, or the name of the general form."""
    return threshold if isinstance(threshold, Named) else Named("threshold", threshold)


def as_rules(
    name: str,
    threshold: ThresholdTree,
    *,
    negative: bool = False,
    none: float = math.inf,
    **more: Any,
) -> PyTree:
    """Return a threshold argument, or each leaf of a tree of them, as rules.

    `negative` and `more` are options of `_validate.number`.
    """
    if not negative:
        _validate.threshold_given(name, threshold)

    def as_rule(value: PyTree) -> Rule:
        if is_rule(value):
            return value
        if value is None:
            return Constant(none)
        if _is_factory(value) or not (callable(value) or _validate.is_number(value)):
            raise TypeError(_validate.must_be(name, _WANTED, value, _advice(value)))
        if callable(value):
            return Schedule(value)
        _validate.number(name, value, negative=negative, **more)
        # JAX does not accept Python ints of more than 32 bits.
        return Constant(float(value) if isinstance(value, int) else value)

    # An optimizer is a tuple of functions, which would be read as schedules.
    return jax.tree.map(
        as_rule, threshold,
        is_leaf=lambda x: x is None or is_transformation(x) or is_rule(x),
    )  # fmt: skip


def _advice(value: object) -> str:
    """Return the fix for values that are close to a rule."""
    if isinstance(value, str):
        return "Pass a number, such as 1.0 without quotes."
    module = getattr(value, "__module__", None) or ""
    if is_transformation(value) or module.startswith(_RECIPES):
        return (
            "A transformation is not a threshold. Pass a rule, such as"
            " optclip.thresholds.zscore() instead of optclip.recipes.zclip()."
        )
    if isinstance(value, FunctionType):
        return f"Call the function and pass its result, {value.__name__}(...)."
    if isinstance(value, type) and hasattr(value, "update"):
        return f"Pass an instance of the class, {value.__name__}(...)."
    return ""


def one_rule(name: str, threshold: Threshold, *, negative: bool = False) -> Rule:
    """Return a threshold argument as one rule; raise for a tree of them."""
    rule = as_rules(name, threshold, negative=negative)
    wanted = (
        "one number, optax schedule or rule, such as optclip.thresholds.quantile(0.9)"
    )
    _validate.require(name, threshold, isinstance(rule, Rule), wanted, error=TypeError)
    return rule


def _is_factory(value: object) -> bool:
    """Return whether `value` is a class, or a function of optclip such as `zscore`.

    A schedule is a function too. The functions that optclip itself passes as schedules
    are local, and have "<locals>" or "<lambda>" in their names.
    """
    if not isinstance(value, FunctionType) or "<" in value.__qualname__:
        return isinstance(value, type)
    return value.__module__.startswith((_RULES, _RECIPES))
