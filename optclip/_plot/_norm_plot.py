"""Plot the norms before and after clipping, or the fraction clipped."""

from __future__ import annotations

import numpy as np

from .._monitor import percent
from .._typing import History
from . import _history, _style
from ._history import ClipHistory, Steps
from ._style import Axes

# A mean of fewer steps would not be smoother than the steps.
_MEAN_OVER = 25


def norms(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the norm before and after clipping, and the threshold, at each step.

    For leaves, axes and elements this plots the fraction of the norms clipped, or the
    largest norm if no threshold is finite. With `record="leaves"` and `part=`, it plots
    the norms of one leaf. Steps with a non-finite norm are marked at the top. The axis
    is logarithmic if norms differ by more than a factor of 30.

    Example:
      >>> import optclip
      >>> history = {
      ...     "clip/norm": [1.0, 3.0], "clip/threshold": [2.0, 2.0],
      ...     "clip/coefficient": [1.0, 2 / 3],
      ... }
      >>> ax = optclip.plot.norms(history)
      >>> print([line.get_label() for line in ax.lines])
      ['before', 'after', 'threshold']

    Args:
      history: Output of `optclip.metrics` per step, in a form that `optclip.plot`
        describes.
      clip: Name of the transformation. Default: the only one, or the only `skip`.
      part: Label of a group or path of a leaf. Default: the only one.
      ax: Axes to draw on. Default: a new figure.

    Returns:
      The axes.
    """
    record = _history.clip_in(history, clip, part)
    ax = _style.new_axes(ax)
    y = "norm of the updates"
    if record.fraction is None:
        _draw_norms(ax, record)
    elif np.isfinite(record.threshold).any():
        _draw_fraction(ax, record.steps, record.fraction)
        y = "fraction of the norms clipped"
    else:
        _draw_line(ax, record.steps.at, record.norm, "largest norm", _style.AFTER)
        _style.set_scale(ax, record.norm)
    nonfinite_steps = record.steps.at[~np.isfinite(record.norm)]
    if nonfinite_steps.size:
        ax.plot(
            nonfinite_steps, np.full(nonfinite_steps.size, 0.98), "x", color=_style.BAD,
            label="not finite", transform=ax.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    return _style.finish(ax, x=record.steps.label, y=y, title=_title(record))


def _title(record: ClipHistory) -> str:
    if record.fraction is None or not np.isfinite(record.threshold).any():
        return record.title
    mean = percent(float(np.mean(record.fraction)))
    message = f"{mean} of the norms clipped on average"
    return f"{record.title}: {message}" if record.title else message


def _draw_line(
    ax: Axes, steps: np.ndarray, y: np.ndarray, label: str, color: str,
    width: float = _style.MAIN,
) -> None:  # fmt: skip
    style = {"color": color, "lw": width, "label": label}
    ax.plot(steps, _style.gaps(y), **style, **_style.dots(y))


def _draw_fraction(ax: Axes, steps: Steps, fraction: np.ndarray) -> None:
    """Draw the fraction at each step, with its running mean for a long run."""
    each = f"each {steps.unit.removesuffix('s')}"
    if len(fraction) <= _MEAN_OVER:
        _draw_line(ax, steps.at, fraction, each, _style.AFTER)
    else:
        _draw_line(ax, steps.at, fraction, each, _style.BEFORE, _style.DETAIL)
        sums = np.cumsum(np.append(0.0, fraction))
        means = (sums[_MEAN_OVER:] - sums[:-_MEAN_OVER]) / _MEAN_OVER
        label = f"mean of the last {_MEAN_OVER} {steps.unit}"
        _draw_line(ax, steps.at[_MEAN_OVER - 1 :], means, label, _style.AFTER)
    ax.set_ylim(-0.02, 1.02)


def _draw_norms(ax: Axes, record: ClipHistory) -> None:
    steps = record.steps.at
    # A narrow dark line over a broad light one keeps both visible where they are equal.
    _draw_line(ax, steps, record.norm, "before", _style.BEFORE, _style.UNDER)
    _draw_line(ax, steps, record.after, "after", _style.AFTER, _style.DETAIL)
    drawn = [record.norm, record.after]
    if np.isfinite(record.threshold).any():
        limit = _style.gaps(record.threshold)
        style = {"ls": "--", "color": _style.THRESHOLD, "lw": _style.MAIN}
        dots = _style.dots(limit, "_", 14.0)
        ax.step(steps, limit, where="mid", label="threshold", **style, **dots)
        drawn.append(record.threshold)
    _style.set_scale(ax, *drawn)
