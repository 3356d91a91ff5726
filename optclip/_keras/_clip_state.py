"""Read the clipping state of a Keras model or optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._types import PyTree
from ._clipped import Clipping


def clip_state(model: Any) -> PyTree:
    """Read the clipping state of a Keras model, for `optclip.metrics` and others.

    During `model.fit` it reads the state of the last step, and waits for it.

    Example::

        print(optclip.summary(optclip.keras.clip_state(model)))

    Args:
      model: A compiled model or an optimizer, with a clipped optimizer that may be
        inside a `LossScaleOptimizer`.

    Returns:
      A copy of the state of the transformation that `clipped` was called with.

    Raises:
      TypeError: There is no optimizer that `clipped` has returned.
      ValueError: The optimizer has not been built.
    """
    optimizer = getattr(model, "optimizer", model)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    wanted = "a Keras model or optimizer with a clipped optimizer"
    if not isinstance(optimizer, Clipping):
        advice = (
            "Pass compile(...) the result of optclip.keras.clipped(optimizer, clip)."
        )
        raise TypeError(_validate.must_be("model", wanted, model, advice))
    if not optimizer.built:
        advice = "Train it, or call optimizer.build(model.trainable_variables)."
        raise ValueError(_validate.must_be("model", f"{wanted} built", model, advice))
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    # The next step of `model.fit` deletes the arrays of the variables.
    return jax.tree.map(jnp.copy, optimizer.optclip_held.state())
