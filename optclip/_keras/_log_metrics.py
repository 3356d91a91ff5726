"""A Keras callback that logs clipping metrics."""

from __future__ import annotations

from typing import Any

from .._arrays import _validate
from .._monitor import metrics
from ._clip_state import clip_state
from ._library import keras


def log_metrics(every: int | None = None) -> Any:
    """Build a Keras callback that adds the clipping metrics to the logs.

    At the end of an epoch, `history.history` and the callbacks that follow in the list
    get the keys of `optclip.metrics`, such as `clip/norm` of the last step and
    `clip/rate` of all steps.

    Example::

        history = model.fit(x, y, callbacks=[optclip.keras.log_metrics()])
        history.history["clip/rate"]

    Args:
      every: Also adds them to the logs of every this many batches, which the callbacks
        that follow receive; waits for these steps. None adds them per epoch only.

    Returns:
      An instance of `keras.callbacks.Callback`.

    Raises:
      ImportError: Keras is not installed.
    """
    if every is not None:
        _validate.length("every", every)
    base = keras().callbacks.Callback

    class LogMetrics(base):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs.update(_read(self.model))

    class LogMetricsOfBatches(LogMetrics):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.done = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # With `steps_per_execution`, Keras calls this once for several batches.
            before, self.done = self.done, (batch + 1) // (every or 1)
            if self.done > before:
                logs.update(_read(self.model))

    return LogMetrics() if every is None else LogMetricsOfBatches()


def _read(model: Any) -> dict[str, float]:
    return {key: value.item() for key, value in metrics(clip_state(model)).items()}
