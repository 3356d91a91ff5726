"""The import of Keras, which stays optional, and checks of what it offers."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .._arrays._call_errors import no_attribute


def __getattr__(name: str) -> object:
    """Raise the error for a missing name of `optclip.keras`, which imports this."""
    raise no_attribute("optclip.keras", name)


def keras() -> Any:
    """Return the module `keras`.

    Raises:
      ImportError: Keras 3 is not installed.
      ValueError: Keras has another backend than JAX.
      RuntimeError: Keras lacks the method that `clipped` overrides.
    """
    fix = "set KERAS_BACKEND=jax before the first import of keras"
    try:
        module = importlib.import_module("keras")
    except ImportError as error:
        raise ImportError(
            "optclip.keras requires Keras 3 on the JAX backend. Install it with pip"
            f" install keras, and {fix}."
        ) from error
    backend = module.backend.backend()
    if backend != "jax":
        raise ValueError(
            f"The backend of Keras must be 'jax', got {backend!r}: {fix}. With another"
            " backend use Keras's own clipnorm, global_clipnorm or clipvalue."
        )
    # Keras has no public method between the accumulation of gradients and the step.
    hook = getattr(module.optimizers.Optimizer, "_clip_gradients", None)
    if hook is None or len(inspect.signature(hook).parameters) != 2:
        raise RuntimeError(
            f"Keras {module.__version__} has no method Optimizer._clip_gradients(grads)"
            ", which is private and which optclip.keras overrides. Use a version of"
            " Keras that docs/integrations.md lists, or optclip in a custom training"
            " loop."
        )
    return module
