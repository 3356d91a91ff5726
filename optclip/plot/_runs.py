"""Several runs beside one another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optclip._arrays import _validate
from optclip.monitor._interface import percent
from optclip.plot import _history, _style
from optclip.plot._style import Axes
from optclip.typing import History


def runs(
    histories: Mapping[str, History],
    *,
    clip: str | None = None,
    part: str | None = None,
    window: int = 25,
    ax: Axes | None = None,
) -> Axes:
    """The running median of the norm before the clip, and how many steps were clipped.

    Args:
      histories: a dict from what to call a run to its history, which is what
        `optclip.metrics` returned: a list of dicts, one a step, a dict of arrays, or
        the path of a file that `optclip.plot.save` wrote.
      clip: the name of the clip in all of them; the only one if None.
      part: a group's label or a leaf's path, for clips that record these.
      window: of how many steps the median is.
      ax: axes to draw on; those of a new figure if None.

    Returns:
      The axes.

    Raises:
      ImportError: Matplotlib is not installed.
      TypeError: `histories` is not a dict.
      ValueError: there is no run; there is no such clip or part, or several and none is
        named; `window` is below 1.

    Example:
      >>> import optclip
      >>> run = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> ax = optclip.plot.runs({"max_norm=2": run})
      >>> print(ax.get_legend_handles_labels()[1])
      ['max_norm=2 (50% clipped)']
    """
    wanted = "a dict from what to call a run to its history"
    _validate.kind("histories", histories, Mapping, wanted)
    if not histories:
        raise ValueError(
            "`histories` must have at least one run, got none. Give a dict such as"
            " {'max_norm=1': history}."
        )
    _validate.length("window", window)
    records = {k: _history.clip_in(h, clip, part) for k, h in histories.items()}
    ax = _style.new_axes(ax)
    medians = []
    for i, (name, run) in enumerate(records.items()):
        medians.append(_running_median(run.norm, window))
        label = f"{name} ({percent(float(np.mean(run.clipped)))} clipped)"
        color = _style.CYCLE[i % len(_style.CYCLE)]
        style = {"ls": _style.LINES[i % len(_style.LINES)], "lw": 1.3, "color": color}
        dots = _style.dots(medians[-1])
        ax.plot(run.steps, medians[-1], label=label, **style, **dots)
    _style.set_scale(ax, *medians)
    title = next(iter(records.values())).title
    return _style.finish(
        ax, x="step", y=f"norm before the clip, median of {window}", title=title
    )


def _running_median(x: np.ndarray, window: int) -> np.ndarray:
    """Of the last numbers up to each; those that are not with_gaps are left out."""
    with_gaps = _style.gaps(x)
    windows = (with_gaps[max(0, i + 1 - window) : i + 1] for i in range(len(x)))
    return np.array([np.nan if np.isnan(w).all() else np.nanmedian(w) for w in windows])
