"""Plot the results of `train_backward.py`: losses per arm, and clipped gradients."""

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

# Okabe and Ito's colors, which color-blind readers and printers distinguish.
ARM_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73")
THRESHOLD_COLORS = ("#CC79A7", "#E69F00", "#56B4E9")
POINTS = 1000  # At most, per threshold.


def draw(results: Mapping[str, tuple[Task, Sequence[Arm], Comparison]]) -> Figure:
    """Draw a row of panels per task. Without pyplot they need no display."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(len(results), 2)
    for panels, (title, result) in zip(grid, results.items(), strict=True):
        task, arms, comparison = result
        left, right = panels
        draw_losses(left, task, arms)
        draw_gradients(right, task, comparison)
        for axes, quantity in ((left, "loss"), (right, "gradient, clipped cotangents")):
            axes.set_title(
                f"{title}: {quantity}", loc="left", weight="bold", fontsize="medium"
            )
            axes.spines[["top", "right"]].set_visible(False)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper left", ncols=4, frameon=False)
    figure.supxlabel(
        "Left: lines are means of the search; points are new seeds at an arm's best"
        " rate. Larger losses are drawn at the top.\nRight: a point per batch and"
        " threshold, along the runs with global-norm clipping.",
        fontsize="small", x=0.01, ha="left",
    )  # fmt: skip
    return figure


def draw_losses(axes: Axes, task: Task, arms: Sequence[Arm]) -> None:
    """Draw the search as lines, and new seeds as points at each arm's best rate."""
    top = min(2.2 * task.learned, task.learned + 0.5)
    rates = np.asarray(task.rates)
    for place, (arm, color) in enumerate(zip(arms, ARM_COLORS, strict=True)):
        # Shifted, so that the last arm does not hide the others.
        shift = 1.06 ** (place - (len(arms) - 1) / 2)
        mean = np.minimum(arm.searched, top).mean(axis=1)
        style = {"color": color, "clip_on": False}
        axes.plot(rates * shift, mean, lw=1.8, label=arm.name, **style)
        losses = np.minimum(arm.losses, top)
        positions = np.full(len(losses), arm.setting.rate * shift)
        axes.plot(positions, losses, "o", ms=6, mew=0, alpha=0.7, **style)
    axes.axhspan(task.learned, top, color="0.92", lw=0, zorder=0)
    axes.text(
        0.99, task.learned, "has not learned", va="bottom", ha="right",
        fontsize="small", color="0.35", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(None, top))


def draw_gradients(axes: Axes, task: Task, comparison: Comparison) -> None:
    """Draw the ratio of the norms with and without clipping over the unclipped norm."""
    norms = comparison.norm.ravel()
    # An exploding run has a few norms that are far larger than all others.
    usual = np.flatnonzero(np.isfinite(norms) & (norms <= np.quantile(norms, 0.99)))
    drawn = usual[:: -(-len(usual) // POINTS)]
    for i, color in enumerate(THRESHOLD_COLORS[: len(task.max_cotangents)]):
        ratios = comparison.clipped_norm[..., i].ravel()[drawn] / norms[drawn]
        axes.plot(
            norms[drawn], ratios, "o", ms=3, mew=0, alpha=0.5, color=color,
            label=f"clipped at {task.max_cotangents[i]:g}",
        )  # fmt: skip
    axes.axhline(1, color="black", lw=1, ls="--")
    axes.text(
        0.99, 1.01, "above: larger than unclipped", va="bottom", ha="right",
        fontsize="small", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="norm of the unclipped gradient")
    axes.set_ylabel("norm with clipping / unclipped")
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.15))
    label_plainly(axes.xaxis)
    label_plainly(axes.yaxis)
    legend = axes.legend(loc="lower left", frameon=False, markerscale=2)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)


def label_plainly(axis: Axis) -> None:
    """Set ticks at 1, 2, 5, 10, ... or, for a wide range, at powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())
