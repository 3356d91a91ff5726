"""How often a clip clips."""

from __future__ import annotations

import numpy as np

from optclip._arrays import _validate
from optclip.plot import _history, _style
from optclip.plot._style import Axes
from optclip.typing import History


def rate(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    window: int = 100,
    ax: Axes | None = None,
) -> Axes:
    """The fraction of steps that were clipped: so far, and among the last `window`.

    Args:
      history: what `optclip.metrics` returned in a run: a list of dicts, one a step, a
        dict of arrays, or the path of a file that `optclip.plot.save` wrote. A step was
        clipped if its coefficient is not 1, and its norm finite and above 0.
      clip: the name of the clip; the only one if None.
      part: a group's label or a leaf's path, for clips that record these.
      window: how many steps the second line looks back.
      ax: axes to draw on; those of a new figure if None.

    Returns:
      The axes.

    Raises:
      ImportError: Matplotlib is not installed.
      ValueError: there is no such clip or part, or several and none is named; `window`
        is below 1.

    Example:
      >>> import optclip
      >>> history = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> print(optclip.plot.rate(history).lines[0].get_ydata())
      [0.  0.5]
    """
    _validate.length("window", window)
    record = _history.clip_in(history, clip, part)
    ax = _style.new_axes(ax)
    total = np.cumsum(record.clipped)
    count = np.arange(1, len(total) + 1)
    before = np.concatenate([np.zeros(window), total])[: len(total)]
    lately = (total - before) / np.minimum(count, window)
    rate, style = total / count, {"color": _style.AFTER, "label": "so far"}
    ax.plot(record.steps, rate, **style, **_style.dots(rate))
    if len(total) > window:
        style = {"ls": "--", "color": _style.THRESHOLD, "lw": 1}
        ax.plot(record.steps, lately, label=f"last {window} steps", **style)
    ax.set_ylim(-0.02, 1.02)
    return _style.finish(
        ax, x="step", y="fraction of steps clipped", title=record.title
    )
