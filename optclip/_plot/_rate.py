"""Plot how often a transformation clips."""

from __future__ import annotations

import numpy as np

from .._arrays import _validate
from .._typing import History
from . import _history, _style
from ._style import Axes


def rate(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    window: int = 100,
    ax: Axes | None = None,
) -> Axes:
    """Plot the fraction of steps clipped, so far and over the last `window` steps.

    A step is clipped if its coefficient is not 1 and its norm is finite and above 0.

    Example:
      >>> import optclip
      >>> history = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> print(optclip.plot.rate(history).lines[0].get_ydata())
      [0.  0.5]

    Args:
      history: Output of `optclip.metrics` per step, in a form that `optclip.plot`
        describes.
      clip: Name of the transformation. Default: the only one, or the only `skip`.
      part: Label of a group or path of a leaf. Default: the only one.
      window: Number of steps in the running fraction, or of records if not every step
        was logged. Default: 100.
      ax: Axes to draw on. Default: a new figure.

    Returns:
      The axes.
    """
    window = _validate.length("window", window)
    record = _history.clip_in(history, clip, part)
    ax = _style.new_axes(ax)
    total, steps = np.cumsum(record.clipped), record.steps
    count = np.arange(1, len(total) + 1)
    before = np.concatenate([np.zeros(window), total])[: len(total)]
    lately = (total - before) / np.minimum(count, window)
    rate, style = total / count, {"color": _style.AFTER, "lw": _style.MAIN}
    ax.plot(steps.at, rate, label="so far", **style, **_style.dots(rate))
    if len(total) > window:
        style = {"ls": "--", "color": _style.THRESHOLD, "lw": _style.MAIN}
        ax.plot(steps.at, lately, label=f"last {window} {steps.unit}", **style)
    ax.set_ylim(-0.02, 1.02)
    return _style.finish(
        ax, x=steps.label, y=f"fraction of {steps.unit} clipped", title=record.title
    )
