"""Further arguments of a recipe, passed on to the clip or skip it makes."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from optclip._arrays import _validate
from optclip.typing import Number, NumberOrSchedule


def unwrapped(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments; optax.inject_hyperparams passes them as one named `options`."""
    inner = options.get("options")
    return inner if len(options) == 1 and isinstance(inner, dict) else dict(options)


def build(
    make: Callable[..., optax.GradientTransformationExtraArgs],
    options: Mapping[str, Any],
    *arguments: Any,
    **fixed: Any,
) -> optax.GradientTransformationExtraArgs:
    """What `make` returns for the arguments of a method and the options of its user."""
    chosen = unwrapped(options)
    parameters = inspect.signature(make).parameters.values()
    accepted = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for name, value in chosen.items():
        if name in fixed:
            wanted = "left out, since this method is defined by its own"
            advice = f"To choose it build another method with {make.__name__}."
            raise TypeError(_validate.must_be(name, wanted, value, advice))
    _validate.options(chosen, accepted - fixed.keys())
    return make(*arguments, **fixed, **chosen)


def scheduled(
    function: Callable[..., Number], *values: NumberOrSchedule
) -> NumberOrSchedule:
    """`function` of numbers, or the schedule of it if one of them is a schedule."""
    if not any(callable(value) for value in values):
        return function(*values)
    return lambda step: function(*(v(step) if callable(v) else v for v in values))


def refuse_behind_moments(name: str, options: Mapping[str, Any]) -> None:
    """Raise for a policy that would hide that moments are NaN, and train no more."""
    if unwrapped(options).get("nonfinite") == "zero":
        raise ValueError(
            f"`nonfinite` must not be 'zero' for {name}, which clips behind its"
            " moments: after one NaN they stay NaN, and all updates would be zero from"
            " then on. Leave it out, and wrap the optimizer:"
            f" optclip.skip({name}(...))."
        )
