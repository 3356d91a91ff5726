"""Clip gradients in `model.fit` of Keras 3 on JAX.

Build the clipped optimizer before `compile`::

    optimizer = optclip.keras.clipped(keras.optimizers.Adam(1e-2), clip)
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[optclip.keras.log_metrics()])
    optclip.summary(optclip.keras.clip_state(model))

Keras is imported at the first call and installed by `pip install keras`. Set
`KERAS_BACKEND=jax` before that.
"""

from ._keras._clipped import clip_state, clipped, log_metrics
from ._keras._library import __getattr__ as __getattr__

__all__ = ["clip_state", "clipped", "log_metrics"]
