"""Thresholds that depend only on the step: numbers and schedules."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from .._arrays._types import Number, PyTree
from ._rule import Seen


class _WithoutMemory(abc.ABC):
    """A rule that depends only on the step."""

    @abc.abstractmethod
    def at(self, step: jax.Array) -> Number:
        """Return the threshold at a step."""

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[Number, PyTree]:
        return self.at(seen.step), memory


# Compared by identity, since arrays may be traced.
@dataclasses.dataclass(frozen=True, eq=False)
class Constant(_WithoutMemory):
    """A fixed threshold; numbers and arrays are converted to it."""

    is_stateless: ClassVar[bool] = True

    value: Number

    def at(self, step: jax.Array) -> Number:
        del step
        return self.value


@dataclasses.dataclass(frozen=True)
class Schedule(_WithoutMemory):
    """A threshold that follows an optax schedule; callables are converted to it."""

    function: Callable[[jax.Array], Any]  # optax has other unions of number types.

    def at(self, step: jax.Array) -> Number:
        return self.function(step)
