"""Plot the norm of each group or leaf over time."""

from __future__ import annotations

import numpy as np

from .._typing import History
from . import _history, _style
from ._style import Axes

# More columns and rows than these cannot be distinguished in a figure.
_COLUMNS, _ROWS = 200, 60
# Norms below this fraction of the largest in their column are rounding noise.
_NOISE = 1e-6
# Its lightness rises evenly over a wide range, and no norm is white.
_COLORS = "viridis"


def heatmap(
    history: History, *, clip: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the norm of each group or leaf over the steps, largest on top.

    Parts that differ only in a last number, such as the layers of `optclip.layers`, are
    rows in its order. Of more than 200 steps, each column shows the largest norm of
    several. Of more than 60 leaves, those with the largest medians are shown.
    Norms below 1e-6 of the largest in their step do not widen the range of colors.
    Non-finite norms, and steps that were not logged, are white.

    Example:
      >>> import optclip
      >>> history = {"clip/norm/bias": [0.1, 0.2], "clip/norm/kernel": [3.0, 4.0]}
      >>> ax = optclip.plot.heatmap(history)
      >>> print([label.get_text() for label in ax.get_yticklabels()])
      ['kernel', 'bias']

    Args:
      history: Output of `optclip.metrics` per step, from clipping per group or with
        `record="leaves"`, in a form that `optclip.plot` describes.
      clip: Name of the transformation. Default: the only one with groups or leaves, or
        the only such `skip`.
      ax: Axes to draw on. Default: a new figure whose size fits the rows.

    Returns:
      The axes.

    Raises:
      ValueError: The transformation records one norm only, or no norm is finite and
        above 0.
    """
    name, steps, parts = _history.parts_of(history, clip)
    finite = {
        key: np.where(np.isfinite(x) & (x > 0), x, np.nan) for key, x in parts.items()
    }
    if all(np.isnan(x).all() for x in finite.values()):
        raise ValueError(
            f"`history` has no finite norm above 0 in {len(steps.at)} steps. Record"
            " steps with gradients."
        )
    size = {key: _median(x) for key, x in finite.items()}
    order = _with_layers_in_order(sorted(parts, key=lambda key: -size[key])[:_ROWS])
    columns, (left, right) = _columns_of(steps.at)
    rows = np.stack([_largest(finite[key], columns) for key in order])
    in_range = rows[rows >= _NOISE * np.fmax.reduce(rows)]
    width = max(_style.WIDTH, 4.5 + 0.075 * max(map(len, order)))
    ax = _style.new_axes(ax, height=1.6 + 0.24 * len(order), width=width)
    image = ax.imshow(
        rows, aspect="auto", cmap=_COLORS, interpolation="nearest", norm="log",
        extent=(left, right, len(order) - 0.5, -0.5),
        vmin=in_range.min(), vmax=in_range.max(),
    )  # fmt: skip
    has_noise = np.fmin.reduce(rows, axis=None) < in_range.min()
    extend = "min" if has_noise else "neither"
    bar = ax.figure.colorbar(image, ax=ax, label="norm", extend=extend)
    _style.set_log_ticks(bar.ax.yaxis, in_range)
    ax.set_yticks(range(len(order)), order, fontsize=_style.small(ax), parse_math=False)
    is_part = len(order) < len(parts)
    which = f", the largest {len(order)} of {len(parts)}" if is_part else ""
    _style.finish(ax, x=steps.label, y="", title=f"norms recorded by '{name}'{which}")
    ax.grid(visible=False)
    return ax


def _with_layers_in_order(parts: list[str]) -> list[str]:
    """Return the parts, those that differ only in a last number as sequences of it."""
    stacks: dict[str, list[tuple[int, str]]] = {}
    for part in parts:
        stack, _, last = part.rpartition("/")
        is_layer = last.isdecimal()
        number = int(last) if is_layer else 0
        stacks.setdefault(stack if is_layer else part, []).append((number, part))
    return [part for stack in stacks.values() for _, part in sorted(stack)]


def _median(x: np.ndarray) -> float:
    return float(np.nanmedian(x)) if np.isfinite(x).any() else 0.0


def _columns_of(steps: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the column of each step, and the first and last edge of the columns.

    An image has columns of the same width. Nine tenths of the distances between steps
    are at most this width, so that few columns are empty except in a gap.
    """
    distances = np.diff(np.unique(steps))
    is_one = not distances.size
    distance = 1.0 if is_one else float(np.quantile(distances, 0.9, method="lower"))
    left, right = steps.min() - 0.5 * distance, steps.max() + 0.5 * distance
    count = min(max(round((right - left) / distance), 1), _COLUMNS)
    columns = np.floor((steps - left) / (right - left) * count).astype(int)
    return np.minimum(columns, count - 1), (left, right)


def _largest(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the largest norm of each column, NaN for a column without norms."""
    largest = np.full(columns.max() + 1, np.nan)
    np.fmax.at(largest, columns, x)
    return largest
