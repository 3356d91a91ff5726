"""Plot the loss of a run."""

from __future__ import annotations

import numpy as np

from .._monitor import read
from .._typing import History
from . import _history, _style
from ._style import Axes


def losses(history: History, *, ax: Axes | None = None) -> Axes:
    """Plot the loss at each step that has one."""
    columns = read(history)
    has_loss = ~np.isnan(columns["loss"])
    loss, steps = columns["loss"][has_loss], _history.steps_in(columns)
    at = steps.at[has_loss]
    ax = _style.new_axes(ax)
    style = {"color": _style.AFTER, "lw": _style.DETAIL, "label": "loss"}
    ax.plot(at, _style.gaps(loss), **style, **_style.dots(loss))
    _style.mark_not_finite(ax, at[np.isinf(loss)])
    if np.all(loss > 0):
        _style.set_scale(ax, loss)
    return _style.finish(ax, x=steps.label, y="loss", title="")
