"""The norm before and after a clip, with the threshold."""

from __future__ import annotations

import numpy as np

from optclip.plot import _history, _style
from optclip.plot._style import Axes
from optclip.typing import History


def norms(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The norm before and after, and the threshold, at each step.

    A step whose norm is not finite is marked at the top. Of a clip by leaf, axis or
    element the norm is the largest of all and the threshold the smallest, and what was
    left is not known. The axis is logarithmic if norms differ by more than 30 times.

    Args:
      history: what `optclip.metrics` returned in a run: a list of dicts, one a step, a
        dict of arrays, or the path of a file that `optclip.plot.save` wrote.
      clip: the name of the clip; the only one if None.
      part: a group's label or a leaf's path, for clips that record these.
      ax: axes to draw on; those of a new figure if None.

    Returns:
      The axes.

    Raises:
      ImportError: Matplotlib is not installed.
      ValueError: there is no such clip or part, or several and none is named.

    Example:
      >>> import optclip
      >>> history = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> ax = optclip.plot.norms(history)
      >>> print([line.get_label() for line in ax.lines])
      ['before', 'after', 'threshold']
    """
    record = _history.clip_in(history, clip, part)
    ax = _style.new_axes(ax)
    steps = record.steps
    # A narrow dark line is drawn over a broad light one, so that both are visible where
    # they are equal.
    before = {"color": _style.BEFORE, "lw": 2.4, "label": "before"}
    ax.plot(steps, _style.gaps(record.norm), **before, **_style.dots(record.norm))
    drawn = [record.norm]
    if record.after is not None:
        style = {"color": _style.AFTER, "lw": 1, "label": "after"}
        ax.plot(steps, _style.gaps(record.after), **style, **_style.dots(record.after))
        drawn.append(record.after)
    if np.isfinite(record.threshold).any():
        limit = _style.gaps(record.threshold)
        style = {"ls": "--", "color": _style.THRESHOLD, "lw": 1.2}
        dots = _style.dots(limit, "_", 14.0)
        ax.step(steps, limit, where="mid", label="threshold", **style, **dots)
        drawn.append(record.threshold)
    _style.set_scale(ax, *drawn)
    bad = np.flatnonzero(~np.isfinite(record.norm))
    if bad.size:
        ax.plot(
            steps[bad], np.full(bad.size, 0.98), "x", color=_style.BAD,
            label="not finite", transform=ax.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    return _style.finish(ax, x="step", y="norm of the updates", title=record.title)
