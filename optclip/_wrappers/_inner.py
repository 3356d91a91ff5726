"""Checks that wrappers share: of the wrapped transformation and of the state."""

from __future__ import annotations

from typing import Any

import optax

from .._arrays import _validate

_ADVICE = "Pass one, such as optax.adam(1e-3) or optclip.clip_by_global_norm(1.0)."


def transformation(
    name: str, value: Any, advice: str = _ADVICE
) -> optax.GradientTransformationExtraArgs:
    """Return `value` as a transformation with extra arguments, or raise."""
    if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
        advice = "Pass its .gradient_transformation()."
    wanted = "an optax transformation"
    _validate.kind(name, value, optax.GradientTransformation, wanted, advice)
    return optax.with_extra_args_support(value)


def check_state(state: Any, kind: type) -> None:
    """Raise unless `state` is a state of this wrapper."""
    advice = (
        "Pass the state returned by this transformation's init or by its previous"
        " update. optclip.carry_over moves the state of another optimizer to this one."
    )
    _validate.kind(
        "state", state, kind, f"the {kind.__name__} of this transformation", advice
    )
