"""Plot the results of `train_muon.py`: attention logits and losses over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_muon import Run

# Okabe and Ito's colors, which color-blind readers and printers distinguish.
COLORS = ("#D55E00", "#0072B2")
SMOOTH = 10  # The number of steps over which losses are averaged.


def draw(runs: Mapping[str, Sequence[Run]], max_logit: float) -> Figure:
    """Draw logits on the left, losses on the right. Without pyplot needs no display."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.axhline(max_logit, color="black", lw=1, ls="--", zorder=3)
    left.text(
        0.01, max_logit, "QK-Clip's threshold", va="bottom", fontsize="small",
        transform=left.get_yaxis_transform(),
    )  # fmt: skip
    for (name, of_seeds), color in zip(runs.items(), COLORS, strict=True):
        for i, run in enumerate(of_seeds):
            label = name if i == 0 else None
            draw_line(left, run.peaks, 1, color, label)
            draw_line(right, run.losses, SMOOTH, color, label)
    left.set(title="Largest attention logit", ylim=(0, None))
    right.set(title="Loss, nats per character")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(loc="lower right", frameon=False)
    return figure


def draw_line(
    axes: Axes, values: np.ndarray, smooth: int, color: str, label: str | None
) -> None:
    """Draw a thin line whose points are means over `smooth` steps."""
    means = values.reshape(-1, smooth).mean(axis=1)
    steps = np.arange(len(means)) * smooth + (smooth - 1) / 2
    axes.plot(steps, means, color=color, lw=0.9, alpha=0.8, label=label)
