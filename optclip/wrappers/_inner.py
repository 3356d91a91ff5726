"""The transformation that a wrapper goes around."""

from typing import Any

import optax

from optclip._arrays import _validate


def transformation(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """`value` as a transformation that takes extra arguments; raise if it is none."""
    advice = "Give one, such as optax.adam(1e-3) or optclip.clip_by_global_norm(1.0)."
    if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
        advice = "Give its .gradient_transformation()."
    wanted = "an optax transformation"
    _validate.kind(name, value, optax.GradientTransformation, wanted, advice)
    return optax.with_extra_args_support(value)
