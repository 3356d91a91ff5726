"""Plot the loss of a run."""

from __future__ import annotations

import numpy as np

from .._monitor import outliers, read
from .._typing import History
from . import _history, _style
from ._style import Axes


def losses(history: History, *, ax: Axes | None = None) -> Axes:
    """Plot the loss at each step that has one, with marks where it stands out."""
    columns = read(history)
    has_loss = ~np.isnan(columns["loss"])
    loss, steps = columns["loss"][has_loss], _history.steps_in(columns)
    at = steps.at[has_loss]
    ax = _style.new_axes(ax)
    style = {"color": _style.AFTER, "lw": _style.DETAIL, "label": "loss"}
    ax.plot(at, _style.gaps(loss), **style, **_style.dots(loss))
    high = outliers(loss, is_loss=True, has_start=True).rows
    if high.any():
        mark = {"color": _style.THRESHOLD, "markersize": 4.0, "label": "stands out"}
        ax.plot(at[high], loss[high], "o", **mark)
    _style.mark_not_finite(ax, at[np.isinf(loss)])
    if np.all(loss > 0):
        _style.set_scale(ax, loss)
    return _style.finish(ax, x=steps.label, y="loss", title="")
