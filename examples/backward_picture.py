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
POINTS = 1500  # Of each threshold.


def draw(results: Mapping[str, tuple[Task, Sequence[Arm], Comparison]]) -> Figure:
    """A line of panels for each task. Without pyplot it needs no display."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(len(results), 2)
    for (left, right), (title, (task, arms, seen)) in zip(
        grid, results.items(), strict=True
    ):
        draw_losses(left, task, arms)
        draw_gradients(right, task, seen)
        left.set_title(f"{title}: loss", loc="left", weight="bold")
        title = f"{title}: gradients if cotangents are clipped"
        right.set_title(title, loc="left", weight="bold")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, task: Task, arms: Sequence[Arm]) -> None:
    """Lines of the search, and new seeds as points at the best rate of each arm.

    A loss above the top is drawn at the top.
    """
    top = 1.2 * task.learned
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
        0.01, task.learned, "has not learned", va="bottom", fontsize="small",
        color="0.35", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    label = "loss (points: new seeds at the best rate,\nlines: mean of the search)"
    axes.set(xlabel="learning rate", ylabel=label, ylim=(None, top))
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.82), frameon=False)


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
        0.99, 1.01, "above: larger than without", va="bottom", ha="right",
        fontsize="small", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="norm of the gradient without a clip")
    axes.set_ylabel("norm with a clip / without")
    top = axes.get_ylim()[1]
    axes.set_ylim(top=max(top, 1.15))
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
