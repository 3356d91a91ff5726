"""Read the clipping state of a Keras model or optimizer, and log its metrics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._types import PyTree
from .._monitor import metrics
from ._clipped import Clipping
from ._library import keras


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


def log_metrics() -> Any:
    """Build a Keras callback that adds the clipping metrics to the logs.

    At the end of an epoch, `history.history` and the callbacks that follow in the list
    get the keys of `optclip.metrics`, such as `clip/norm` of the last step and
    `clip/rate` of all steps. For more often, read `optclip.metrics(clip_state(model))`
    in a callback.

    Example::

        history = model.fit(x, y, callbacks=[optclip.keras.log_metrics()])
        history.history["clip/rate"]

    Returns:
      An instance of `keras.callbacks.Callback`.

    Raises:
      ImportError: Keras is not installed.
    """
    base = keras().callbacks.Callback

    class LogMetrics(base):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            numbers = metrics(clip_state(self.model))
            logs.update({key: value.item() for key, value in numbers.items()})

    return LogMetrics()
