"""Plot the results of `train_muon.py`: attention logits and losses over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plot_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_muon import Run

COLORS = (plot_style.BASELINE, plot_style.BLUE)
SMOOTH = 10  # The number of steps over which losses are averaged.


def draw(runs: Mapping[str, Sequence[Run]], max_logit: float) -> Figure:
    """Draw the logits of each seed, and below them the losses."""
    figure = plot_style.figure(5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 4))
    upper.axhline(max_logit, color=plot_style.ORANGE, ls="--", zorder=3)
    upper.text(
        0.01, max_logit + 2, "QK-Clip's threshold", va="bottom",
        fontsize=plot_style.SMALL, color=plot_style.ORANGE,
        transform=upper.get_yaxis_transform(),
    )  # fmt: skip
    for (name, of_seeds), color in zip(runs.items(), COLORS, strict=True):
        for i, run in enumerate(of_seeds):
            label = name if i == 0 else None
            draw_line(upper, run.peaks, 1, color, lw=1.0, label=label)
            # Broad lines of the first method stay visible below those of the second.
            broad = {"lw": 1.0} if color == COLORS[-1] else {"lw": 3.0, "alpha": 0.3}
            draw_line(lower, run.losses, SMOOTH, color, **broad)
    upper.set(title="Largest attention logit", ylabel="logit", ylim=(0, None))
    lower.set(title="Training loss", xlabel="step", ylabel="nats per character")
    plot_style.finish(upper, legend="lower right")
    plot_style.finish(lower)
    return figure


def draw_line(
    axes: Axes, values: np.ndarray, smooth: int, color: str, **style: Any
) -> None:
    """Draw a line whose points are means over `smooth` steps."""
    means = values.reshape(-1, smooth).mean(axis=1)
    steps = np.arange(len(means)) * smooth + (smooth - 1) / 2
    axes.plot(steps, means, color=color, **style)
