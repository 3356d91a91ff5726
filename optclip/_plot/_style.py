"""Style that all plots share, with colors that differ in print and for all readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._arrays import _validate

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any

# The colors of Okabe and Ito, light to dark.
BEFORE, AFTER, THRESHOLD, BAD = "#56B4E9", "#0072B2", "#D55E00", "#CC79A7"
# Widths of the main lines, of details, and of lines under a main line.
MAIN, DETAIL, UNDER = 1.5, 1.0, 2.8
# Inches, so that labels stay legible if a phone shows the figure at its full width.
WIDTH = 5.4
# Numbers of a wider range than this are plotted on a logarithmic axis, where small ones
# stay visible.
_RANGE = 30.0
# Number of points of a line above which the place of the legend is fixed.
_LONG = 100_000


def new_axes(ax: Axes | None = None, height: float = 3.6, width: float = WIDTH) -> Axes:
    """Return the axes that were passed, or create a figure.

    Raises:
      ImportError: Matplotlib is not installed.
      TypeError: `ax` has another type, such as the array that `plt.subplots` returns.
    """
    if ax is not None and hasattr(ax, "get_ylim"):
        return ax
    _validate.require(
        "ax",
        ax,
        ax is None,
        "Matplotlib axes, or None for a new figure",
        error=TypeError,
    )
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "optclip.plot requires Matplotlib, which is not installed. Install it with"
            " pip install matplotlib."
        ) from error
    # At Matplotlib's default of 100 dots per inch, small labels are blurred on most
    # screens.
    size = {"figsize": (width, height), "dpi": 120}
    return plt.subplots(**size, layout="constrained")[1]


def gaps(x: np.ndarray) -> np.ndarray:
    """Return the numbers with NaN, which draws a gap, for non-finite ones."""
    return np.where(np.isfinite(x), x, np.nan)


def dots(x: np.ndarray, marker: str = "o", size: float = 4.0) -> dict[str, Any]:
    """Return the style that marks points without a neighbor, which no line reaches."""
    is_finite = np.isfinite(x)
    beside = np.append(is_finite[1:], False) | np.append(False, is_finite[:-1])
    alone = np.flatnonzero(is_finite & ~beside)
    if not alone.size:
        return {}
    return {"marker": marker, "markersize": size, "markevery": alone.tolist()}


def set_scale(ax: Axes, *values: np.ndarray) -> None:
    """Use a logarithmic axis if the numbers span a wide range."""
    positive = np.concatenate([x[np.isfinite(x) & (x > 0)] for x in values])
    if positive.size and positive.max() > _RANGE * positive.min():
        ax.set_yscale("log")
        set_log_ticks(ax.yaxis, positive)
    else:
        ax.set_ylim(bottom=0)


def set_log_ticks(axis: Any, positive: np.ndarray) -> None:
    """Label a logarithmic axis with 0.5, 1, 2, ..., or with powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs = (1.0,) if positive.max() > 1000 * positive.min() else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def mark_not_finite(ax: Axes, steps: np.ndarray) -> None:
    """Mark steps at the top."""
    if steps.size:
        ax.plot(
            steps, np.full(steps.size, 0.98), "x", color=BAD, label="not finite",
            transform=ax.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip


def label_whole_numbers(axis: Any) -> None:
    """Label only whole numbers, unless an axis has ticks of the user's choice."""
    from matplotlib.ticker import AutoLocator

    locator = axis.get_major_locator()
    if isinstance(locator, AutoLocator):
        locator.set_params(integer=True, min_n_ticks=1)


def finish(ax: Axes, *, x: str, y: str, title: str) -> Axes:
    """Set labels, title and grid, and a legend if a line has a label."""
    ax.set(xlabel=x, ylabel=y)
    # Steps are whole numbers; a logarithmic axis has another locator.
    label_whole_numbers(ax.xaxis)
    # Names may have a dollar sign.
    ax.set_title(title, parse_math=False)
    ax.set_axisbelow(True)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[1]:
        # Matplotlib's search for the best place warns, and takes seconds, on long runs.
        is_long = any(np.size(line.get_xdata()) > _LONG for line in ax.lines)
        place = "upper right" if is_long else "best"
        ax.legend(loc=place, frameon=is_long, fontsize=small(ax))
    return ax


def small(ax: Axes) -> float:
    """Return the size of small text in points; Matplotlib's "small" is too small."""
    return 0.9 * float(ax.xaxis.label.get_fontsize())
