"""What a wrapper checks: the transformation that it goes around, and its own state."""

from typing import Any

import optax

from optclip._arrays import _validate


def transformation(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """`value` as a transformation with extra arguments; raise if it is not one."""
    advice = "Give one, such as optax.adam(1e-3) or optclip.clip_by_global_norm(1.0)."
    if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
        advice = "Give its .gradient_transformation()."
    wanted = "an optax transformation"
    _validate.kind(name, value, optax.GradientTransformation, wanted, advice)
    return optax.with_extra_args_support(value)


def check_state(state: Any, kind: type) -> None:
    """Raise unless `state` is of this wrapper."""
    advice = (
        "Give the state that init of this very transformation returned, or that the"
        " update before returned."
    )
    _validate.kind(
        "state", state, kind, f"the {kind.__name__} of this transformation", advice
    )
