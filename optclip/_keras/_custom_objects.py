"""Load a Keras model that was saved with a clipped optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from ._check_clip import clipping
from ._clipped import SAVED_NAME, clipped_as_saved
from ._library import keras


def custom_objects(clip: optax.GradientTransformation) -> dict[str, Any]:
    """Build the `custom_objects` that load a model with a clipped optimizer.

    A transformation consists of functions, which Keras does not save. The file has the
    clipping state, and this dict has the transformation.

    Example::

        custom_objects = optclip.keras.custom_objects(clip)
        model = keras.saving.load_model(path, custom_objects=custom_objects)

    Args:
      clip: The transformation that the model was saved with. Fixed thresholds may
        differ.

    Returns:
      A dict with one entry, to which you can add your own classes.

    Raises:
      ValueError: In `load_model`: the state of `clip` has other entries than the saved
        one.
    """
    return {SAVED_NAME: _Loader(clipping(clip))}


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Take the place of the saved class."""

    clip: Any

    def from_config(self, config: dict[str, Any]) -> Any:
        optimizer = keras().optimizers.deserialize(config["optimizer"])
        return clipped_as_saved(optimizer, self.clip, config["clip_state"])
