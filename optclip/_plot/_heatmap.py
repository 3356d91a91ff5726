"""Plot the norm of each group or leaf over time."""

from __future__ import annotations

import numpy as np

from .._typing import History
from . import _history, _style
from ._style import Axes

# More columns and rows than these cannot be distinguished in a figure.
_COLUMNS, _ROWS = 200, 60


def heatmap(
    history: History, *, clip: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the norm of each group or leaf over the steps, largest on top.

    Of more than 200 steps, each column shows the largest norm of several. Of more than
    60 leaves, those with the largest medians are shown. Non-finite norms are white.

    Example:
      >>> import optclip
      >>> history = {"clip/norm/bias": [0.1, 0.2], "clip/norm/kernel": [3.0, 4.0]}
      >>> ax = optclip.plot.heatmap(history)
      >>> print([label.get_text() for label in ax.get_yticklabels()])
      ['kernel', 'bias']

    Args:
      history: Output of `optclip.metrics` per step, from clipping per group or with
        `record="leaves"`, in a form that `optclip.plot` describes.
      clip: Name of the transformation. Default: the only one with groups or leaves.
      ax: Axes to draw on. Default: a new figure whose height fits the rows.

    Returns:
      The axes.

    Raises:
      ValueError: The transformation records one norm only, or no norm is finite and
        above 0.
    """
    name, steps, parts = _history.parts_of(history, clip)
    finite = {key: _drawable(x) for key, x in parts.items()}
    if all(np.isnan(x).all() for x in finite.values()):
        raise ValueError(
            f"`history` has no finite norm above 0 in {len(steps)} steps. Record steps"
            " with gradients."
        )
    size = {key: _median(x) for key, x in finite.items()}
    order = sorted(parts, key=lambda key: -size[key])[:_ROWS]
    rows = np.stack([_binned(finite[key]) for key in order])
    ax = _style.new_axes(ax, height=1.6 + 0.24 * len(order))
    half = 0.5 * (steps[-1] - steps[0]) / max(len(steps) - 1, 1) or 0.5
    image = ax.imshow(
        rows, aspect="auto", cmap="cividis", interpolation="nearest", norm="log",
        extent=(steps[0] - half, steps[-1] + half, len(order) - 0.5, -0.5),
    )  # fmt: skip
    ax.figure.colorbar(image, ax=ax, label="norm")
    ax.set_yticks(range(len(order)), order, fontsize="small")
    left = len(parts) - len(order)
    title = name + (f" (the largest {len(order)} of {len(parts)})" if left else "")
    _style.finish(ax, x="step", y="", title=title)
    ax.grid(visible=False)
    return ax


def _drawable(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x) & (x > 0), x, np.nan)


def _median(x: np.ndarray) -> float:
    return float(np.nanmedian(x)) if np.isfinite(x).any() else 0.0


def _binned(x: np.ndarray) -> np.ndarray:
    """Return at most `_COLUMNS` columns, each the largest norm of its steps."""
    bins = np.array_split(x, min(len(x), _COLUMNS))
    return np.array([np.nan if np.isnan(b).all() else np.nanmax(b) for b in bins])
