"""Checks that wrappers share: of the wrapped transformation, the state and the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _axis_names, _collectives, _numerics, _validate

_ADVICE = "Pass one, such as optax.adam(1e-3) or optclip.clip_by_global_norm(1.0)."
LOSS_ADVICE = (
    "Pass value= or loss=: tx.update(updates, state, params, value=loss). Flax's"
    " TrainState.apply_gradients does not forward it. Without a loss, omit max_loss;"
    " for olmo_skip pass use_loss=False."
)


def transformation(
    name: str, value: Any, advice: str = _ADVICE
) -> optax.GradientTransformationExtraArgs:
    """Return `value` as a transformation with extra arguments, or raise."""
    if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
        advice = "Pass its .gradient_transformation()."
    _validate.kind(
        name, value, optax.GradientTransformation, "an optax transformation", advice
    )
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


def passed_loss(
    extra: dict[str, Any], wanted: str = "the loss, a real scalar"
) -> jax.Array | None:
    """Return the extra argument `value`, or `loss`, the name that some trainers use.

    All devices receive the largest of losses that differ, since they must act alike.
    """
    name = "loss" if extra.get("value") is None else "value"
    value = extra.get(name)
    if value is None:
        return None
    is_scalar = _validate.is_number(value) and not jnp.shape(value)
    _validate.require(name, value, is_scalar, wanted, LOSS_ADVICE)
    loss = _numerics.as_array(value).astype(jnp.float32)
    axes = _axis_names.untyped_axes() or _axis_names.split_axes(loss)
    return _collectives.worst_over(loss, axes) if axes else loss
