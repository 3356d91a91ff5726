"""Plot several runs in one figure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._arrays import _validate
from .._monitor import percent
from .._typing import History
from . import _history, _style
from ._style import Axes


def runs(
    histories: Mapping[str, History],
    *,
    clip: str | None = None,
    part: str | None = None,
    window: int = 25,
    ax: Axes | None = None,
) -> Axes:
    """Plot the running median of the norm before clipping for several runs.

    The legend shows the fraction of steps that each run clipped.

    Example:
      >>> import optclip
      >>> run = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> ax = optclip.plot.runs({"max_norm=2": run})
      >>> print(ax.get_legend_handles_labels()[1])
      ['max_norm=2 (50% clipped)']

    Args:
      histories: Dict from the label of each run to its history, in a form that
        `optclip.plot` describes.
      clip: Name of the transformation in all runs. Default: the only one.
      part: Label of a group or path of a leaf. Default: the only one.
      window: Number of steps in the running median, or of records if not every step
        was logged. Default: 25.
      ax: Axes to draw on. Default: a new figure.

    Returns:
      The axes.
    """
    wanted = "a dict from the label of a run to its history"
    _validate.kind("histories", histories, Mapping, wanted)
    if not histories:
        raise ValueError(
            "`histories` is empty. Pass a dict such as {'max_norm=1': history}."
        )
    window = _validate.length("window", window)
    records = {k: _history.clip_in(h, clip, part) for k, h in histories.items()}
    ax = _style.new_axes(ax)
    medians = []
    for i, (name, run) in enumerate(records.items()):
        medians.append(_running_median(run.norm, window))
        label = f"{name} ({percent(float(np.mean(run.clipped)))} clipped)"
        color = _style.CYCLE[i % len(_style.CYCLE)]
        line = _style.LINES[i % len(_style.LINES)]
        style = {"ls": line, "lw": _style.MAIN, "color": color}
        dots = _style.dots(medians[-1])
        ax.plot(run.steps.at, medians[-1], label=label, **style, **dots)
    _style.set_scale(ax, *medians)
    title = next(iter(records.values())).title
    labels = sorted({run.steps.label for run in records.values()})
    unit = min(run.steps.unit for run in records.values())
    y = f"norm before clipping,\nmedian of {window} {unit}"
    return _style.finish(ax, x=" or ".join(labels), y=y, title=title)


def _running_median(x: np.ndarray, window: int) -> np.ndarray:
    """Return the median of the last numbers up to each, skipping non-finite ones."""
    with_gaps = _style.gaps(x)
    windows = (with_gaps[max(0, i + 1 - window) : i + 1] for i in range(len(x)))
    return np.array([np.nan if np.isnan(w).all() else np.nanmedian(w) for w in windows])
