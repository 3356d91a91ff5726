"""Further arguments of a recipe, passed to `clip_by` or `skip`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from .._arrays import _validate
from .._arrays._call_errors import unknown
from .._arrays._types import Held
from .._typing import Number, NumberOrSchedule, PyTree

# A method measures and clips the same leaves, which `mask` selects.
_NOT_IN_METHODS = {"norm_mask", "clip_mask"}


def unwrapped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as a dict.

    `optax.inject_hyperparams` passes them as a single argument named `options`.
    """
    inner = options.get("options")
    return inner if len(options) == 1 and isinstance(inner, dict) else dict(options)


def for_record(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for one of the records of a method.

    The record is named `part`, or `<name>_<part>` if the user passed a name.
    """
    chosen = unwrapped(options)
    name = chosen.get("name")
    if "name" not in chosen:
        name = part
    elif isinstance(name, str) and name:
        name = f"{name}_{part}"
    # Other names reach `clip_by` unchanged, which rejects them.
    return chosen | {"name": name}


def build(
    recipe: Callable[..., Any],
    make: Callable[..., optax.GradientTransformationExtraArgs],
    options: Mapping[str, Any],
    *arguments: Any,
    **fixed: Any,
) -> optax.GradientTransformationExtraArgs:
    """Call `make` with the arguments of the method `recipe` and the user's options.

    Raises:
      TypeError: An option is unknown, or is set by the method.
    """
    chosen = unwrapped(options)
    parameters = inspect.signature(make).parameters.values()
    accepted = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    wanted = "omitted, since this method sets it"
    advice = f"To set it yourself, use optclip.{make.__name__}."
    for name, value in chosen.items():
        _validate.require(name, value, name not in fixed, wanted, advice, TypeError)
    accepted -= fixed.keys() | _NOT_IN_METHODS
    if others := [name for name in chosen if name not in accepted]:
        accepted |= inspect.signature(recipe).parameters.keys() - {"options"}
        raise TypeError(unknown(recipe.__name__, others[0], accepted))
    return make(*arguments, **fixed, **chosen)


def scheduled(
    function: Callable[..., Number], *values: NumberOrSchedule
) -> NumberOrSchedule:
    """Return `function` of numbers, or its schedule if one of them is a schedule."""
    if not any(callable(value) for value in values):
        return function(*values)
    held = Held(values)
    return lambda step: function(*(v(step) if callable(v) else v for v in held.value))


def masked(
    inner: optax.GradientTransformation, mask: Callable[[PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.masked` in a form that Equinox can open.

    Equinox replaces functions by pytrees, which optax would take for the mask itself.
    It does not replace partial objects.
    """
    return optax.masked(inner, functools.partial(mask))


def reject_zero_after_moments(name: str, options: Mapping[str, Any]) -> None:
    """Raise for the policy `"zero"`, which would hide NaN moments and stop training."""
    if unwrapped(options).get("nonfinite") == "zero":
        raise ValueError(
            f"`nonfinite` must not be 'zero' for {name}, which clips after its moment"
            " estimates: one NaN would make them NaN and every later update zero. Omit"
            f" it, and skip such steps: optclip.skip({name}(...))."
        )


def adam_if_none(
    inner: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    """Return the optimizer, or the moments of Adam."""
    return optax.scale_by_adam() if inner is None else inner
