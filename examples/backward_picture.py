"""The picture of `train_backward.py`: losses of the arms, and clipped gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_backward import Arm, Comparison, Task

# Okabe and Ito's colours, told apart in print and by colour-blind eyes.
ARM_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73")
THRESHOLD_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9")
POINTS = 1500  # Of each threshold.


def draw(results: Mapping[str, tuple[Task, Sequence[Arm], Comparison]]) -> Figure:
    """A line of panels for each task. Without pyplot it needs no display."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    grid = figure.subplots(len(results), 2, width_ratios=(2, 3))
    for (left, right), (title, found) in zip(grid, results.items(), strict=True):
        task, arms, seen = found
        draw_losses(left, task, arms)
        draw_gradients(right, task, seen)
        left.set_title(f"{title}: loss of each seed", loc="left", weight="bold")
        right.set_title(
            f"{title}: gradient with clipped cotangents", loc="left", weight="bold"
        )
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, task: Task, arms: Sequence[Arm]) -> None:
    """A point for each seed; a loss above the top is drawn at the top."""
    top = 1.3 * task.learned
    for place, (arm, colour) in enumerate(zip(arms, ARM_COLOURS, strict=True)):
        losses = np.sort(np.minimum(arm.losses, top))
        places = place + np.linspace(-0.2, 0.2, len(losses))
        axes.plot(
            places, losses, "o", ms=6, mew=0, alpha=0.8, color=colour, clip_on=False
        )
        median = np.median(losses)
        axes.plot([place - 0.32, place + 0.32], [median, median], lw=2, color=colour)
    axes.set_xticks(range(len(arms)), [arm.name for arm in arms])
    axes.axhspan(task.learned, top, color="0.92", lw=0, zorder=0)
    axes.text(
        0.02, task.learned, "has not learned", va="bottom", fontsize="small",
        color="0.35", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set(ylabel="loss after the last step", ylim=(None, top))


def draw_gradients(axes: Axes, task: Task, seen: Comparison) -> None:
    """The norm with cotangents clipped over that without, against that without."""
    norms = seen.norm.ravel()
    known = np.flatnonzero(np.isfinite(norms))
    shown = known[:: max(1, len(known) // POINTS)]
    for i, colour in enumerate(THRESHOLD_COLOURS[: len(task.max_cotangents)]):
        ratios = seen.clipped_norm[..., i].ravel()[shown] / norms[shown]
        axes.plot(
            norms[shown], ratios, "o", ms=3, mew=0, alpha=0.5, color=colour,
            label=f"clipped at {task.max_cotangents[i]:g}",
        )  # fmt: skip
    axes.axhline(1, color="black", lw=1, ls="--")
    axes.text(
        0.99, 1, "larger than without", va="bottom", ha="right", fontsize="small",
        transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="norm of the gradient without a clip", ylabel="norm with / without")
    legend = axes.legend(loc="lower left", frameon=False, markerscale=2)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
