"""Explain a factory that is called as the pure function of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def checks_positions(advice: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a factory name the pure function if it gets too many positional arguments.

    Args:
      advice: Another possible intent of the call.
    """

    def decorated(factory: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(factory).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        name = getattr(factory, "__name__", "")

        @functools.wraps(factory)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > len(names):
                raise TypeError(
                    f"{name}() builds a transformation and takes only"
                    f" {', '.join(names)} by position, got {len(args)} arguments."
                    f"{advice} To clip gradients directly, call"
                    f" {pure_call(name, *names)}."
                )
            return factory(*args, **kwargs)

        return checked

    return decorated


def pure_call(function: str, *names: str) -> str:
    """Return the call of the pure function of a factory, as an error prints it."""
    return f"optclip.functional.{function}({', '.join(['updates', *names])})"
