"""The picture of `train_backward.py`: losses of the arms, and clipped gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

if TYPE_CHECKING:
    from train_backward import Arm, Comparison, Task

# Okabe and Ito's colours, told apart in print and by colour-blind eyes.
ARM_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73")
THRESHOLD_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9")
POINTS = 1000  # Of each threshold.


def draw(results: Mapping[str, tuple[Task, Sequence[Arm], Comparison]]) -> Figure:
    """A line of panels for each task. Without pyplot it needs no display."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(len(results), 2)
    for panels, (title, (task, arms, seen)) in zip(grid, results.items(), strict=True):
        left, right = panels
        draw_losses(left, task, arms)
        draw_gradients(right, task, seen)
        for axes, what in ((left, "loss"), (right, "gradient, cotangents clipped")):
            axes.set_title(
                f"{title}: {what}", loc="left", weight="bold", fontsize="medium"
            )
            axes.spines[["top", "right"]].set_visible(False)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper left", ncols=4, frameon=False)
    figure.supxlabel(
        "Left: lines are the mean of the search, points new seeds at the best rate of the"
        " arm; what is above is drawn at the top.\nRight: a point for each batch and"
        " threshold, along the runs with the global clip.",
        fontsize="small", x=0.01, ha="left",
    )  # fmt: skip
    return figure


def draw_losses(axes: Axes, task: Task, arms: Sequence[Arm]) -> None:
    """Lines of the search, and new seeds as points at the best rate of each arm."""
    top = min(2.2 * task.learned, task.learned + 0.5)
    rates = np.asarray(task.rates)
    for place, (arm, colour) in enumerate(zip(arms, ARM_COLOURS, strict=True)):
        # Beside each other, or the last would hide the others.
        aside = 1.06 ** (place - (len(arms) - 1) / 2)
        mean = np.minimum(arm.searched, top).mean(axis=1)
        style = {"color": colour, "clip_on": False}
        axes.plot(rates * aside, mean, lw=1.8, label=arm.name, **style)
        losses = np.minimum(arm.losses, top)
        places = np.full(len(losses), arm.setting.rate * aside)
        axes.plot(places, losses, "o", ms=6, mew=0, alpha=0.7, **style)
    axes.axhspan(task.learned, top, color="0.92", lw=0, zorder=0)
    axes.text(
        0.99, task.learned, "has not learned", va="bottom", ha="right",
        fontsize="small", color="0.35", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(None, top))


def draw_gradients(axes: Axes, task: Task, seen: Comparison) -> None:
    """The norm with cotangents clipped over that without, against that without."""
    norms = seen.norm.ravel()
    # The few largest may be of a run that explodes, and would leave no room.
    known = np.flatnonzero(np.isfinite(norms) & (norms <= np.quantile(norms, 0.99)))
    shown = known[:: -(-len(known) // POINTS)]
    for i, colour in enumerate(THRESHOLD_COLOURS[: len(task.max_cotangents)]):
        ratios = seen.clipped_norm[..., i].ravel()[shown] / norms[shown]
        axes.plot(
            norms[shown], ratios, "o", ms=3, mew=0, alpha=0.5, color=colour,
            label=f"clipped at {task.max_cotangents[i]:g}",
        )  # fmt: skip
    axes.axhline(1, color="black", lw=1, ls="--")
    axes.text(
        0.99, 1.01, "above: larger than without", va="bottom", ha="right",
        fontsize="small", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="norm of the gradient without a clip")
    axes.set_ylabel("norm with a clip / without")
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.15))
    label_plainly(axes.xaxis)
    label_plainly(axes.yaxis)
    legend = axes.legend(loc="lower left", frameon=False, markerscale=2)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)


def label_plainly(axis: Axis) -> None:
    """Ticks at 1, 2, 5 and their like, in digits; powers of ten where these are many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())
