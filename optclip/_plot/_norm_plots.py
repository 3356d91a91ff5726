"""Plot one norm or the loss: over the steps, as a histogram, as a rate of clipping."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import _validate
from .._monitor import outliers, percent, read
from .._typing import History
from . import _history, _style
from ._history import ClipHistory, Steps
from ._style import Axes

# A mean of fewer steps would not be smoother than the steps.
_MEAN_OVER = 25
_DASHED: Any = {"ls": "--", "color": _style.THRESHOLD, "lw": _style.MAIN}


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
    y, title = "norm", record.title
    if record.fraction is None:
        _draw_norms(ax, record)
    elif np.isfinite(record.threshold).any():
        _draw_fraction(ax, record.steps, record.fraction)
        y = "fraction of the norms clipped"
        mean = percent(float(np.mean(record.fraction)))
        title = f"{title}: " if title else ""
        title += f"{mean} of the norms clipped on average"
    else:
        _draw_line(ax, record.steps.at, record.norm, "largest norm", _style.AFTER)
        _style.set_scale(ax, record.norm)
    _style.mark_not_finite(ax, record.steps.at[~np.isfinite(record.norm)])
    return _style.finish(ax, x=record.steps.label, y=y, title=title)


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
        _draw_line(
            ax,
            steps.at[_MEAN_OVER - 1 :],
            means,
            f"mean of the last {_MEAN_OVER} {steps.unit}",
            _style.AFTER,
        )
    ax.set_ylim(-0.02, 1.02)


def _draw_norms(ax: Axes, record: ClipHistory) -> None:
    steps = record.steps.at
    # A narrow dark line over a broad light one keeps both visible where they are equal.
    _draw_line(ax, steps, record.norm, "before", _style.BEFORE, _style.UNDER)
    _draw_line(ax, steps, record.after, "after", _style.AFTER, _style.DETAIL)
    drawn = [record.norm, record.after]
    if np.isfinite(record.threshold).any():
        limit = _style.gaps(record.threshold)
        dots = _style.dots(limit, "_", 14.0)
        ax.step(steps, limit, where="mid", label="threshold", **_DASHED, **dots)
        drawn.append(record.threshold)
    _style.set_scale(ax, *drawn)


def losses(history: History, *, ax: Axes | None = None) -> Axes:
    """Plot the loss at each step that has one, with marks where it stands out."""
    columns = read(history)
    has_loss = ~np.isnan(columns["loss"])
    loss, steps = columns["loss"][has_loss], _history.steps_in(columns)
    at = steps.at[has_loss]
    ax = _style.new_axes(ax)
    _draw_line(ax, at, loss, "loss", _style.AFTER, _style.DETAIL)
    high = outliers(loss, is_loss=True, has_start=True).rows
    if high.any():
        mark = {"color": _style.THRESHOLD, "markersize": 4.0, "label": "stands out"}
        ax.plot(at[high], loss[high], "o", **mark)
    _style.mark_not_finite(ax, at[np.isinf(loss)])
    if np.all(loss > 0):
        _style.set_scale(ax, loss)
    return _style.finish(ax, x=steps.label, y="loss", title="")


def distribution(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot a histogram of the norms, with the median threshold and its quantile.

    For leaves, axes and elements it shows the most clipped norm of each step, without
    the threshold, which may differ between norms.

    Example:
      >>> import numpy as np, optclip
      >>> norms = np.linspace(1.0, 5.0, 101)
      >>> history = {
      ...     "clip/norm": norms, "clip/threshold": np.full(101, 4.0),
      ...     "clip/coefficient": np.minimum(1, 4.0 / norms),
      ... }
      >>> ax = optclip.plot.distribution(history)
      >>> print(ax.get_legend_handles_labels()[1])
      ['threshold 4: above 74% of the norms']

    Args:
      history: Output of `optclip.metrics` per step, in a form that `optclip.plot`
        describes.
      clip: Name of the transformation. Default: the only one, or the only `skip`.
      part: Label of a group or path of a leaf. Default: the only one.
      ax: Axes to draw on. Default: a new figure.

    Returns:
      The axes.

    Raises:
      ValueError: No norm is finite and above 0.
    """
    record = _history.clip_in(history, clip, part)
    norms = record.norm[np.isfinite(record.norm) & (record.norm > 0)]
    if not norms.size:
        raise ValueError(
            f"`history` has no finite norm above 0 in {len(record.norm)} steps. Record"
            " a run that trains."
        )
    ax = _style.new_axes(ax)
    # The bins are logarithmic, since norms span orders of magnitude.
    low, high = norms.min(), norms.max()
    edges = np.geomspace(low, high if high > low else 2 * low, 41)
    ax.hist(norms, bins=edges.tolist(), color=_style.AFTER, alpha=0.75)
    ax.set_xscale("log")
    _style.set_log_ticks(ax.xaxis, norms)
    # Counts are whole numbers, and the legend has room above them.
    _style.label_whole_numbers(ax.yaxis)
    ax.margins(y=0.15)
    limits = record.threshold[np.isfinite(record.threshold)]
    if limits.size and record.fraction is None:
        limit = float(np.median(limits))
        fraction = float(np.mean(norms < limit))
        ax.axvline(
            limit,
            label=f"threshold {limit:.3g}: above {percent(fraction)} of the norms",
            **_DASHED,
        )
    x = "norm" if record.fraction is None else "most clipped norm of each step"
    return _style.finish(ax, x=x, y=record.steps.unit, title=record.title)


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
    # The dense line of a long run must not hide the other.
    style = {"color": _style.AFTER, "lw": _style.MAIN, "zorder": 2.5}
    rate = total / count
    ax.plot(steps.at, rate, label="so far", **style, **_style.dots(rate))
    if len(total) > window:
        ax.plot(steps.at, lately, label=f"last {window} {steps.unit}", **_DASHED)
    ax.set_ylim(-0.02, 1.02)
    return _style.finish(
        ax, x=steps.label, y=f"fraction of {steps.unit} clipped", title=record.title
    )
