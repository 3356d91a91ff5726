"""Plot the results of `train_backward.py`: losses per arm, and clipped gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plot_style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

if TYPE_CHECKING:
    from train_backward import Arm, Comparison, Task

ARM_COLORS = (
    plot_style.BASELINE, plot_style.BLUE, plot_style.ORANGE, plot_style.GREEN,
)  # fmt: skip
THRESHOLD_COLORS = (plot_style.PINK, plot_style.YELLOW, plot_style.SKY)
POINTS = 1000  # At most, per threshold.


def draw(results: Mapping[str, tuple[Task, Sequence[Arm], Comparison]]) -> Figure:
    """Draw the losses of each task, and below them the gradients of the last."""
    figure = plot_style.figure(8.4)
    *upper, lower = figure.subplots(len(results) + 1, 1)
    for axes, (title, (task, arms, _)) in zip(upper, results.items(), strict=True):
        draw_losses(axes, task, arms)
        axes.set_title(title)
        plot_style.finish(axes)
    remark(upper[0], 0.01, next(iter(results.values()))[0].learned, "not learned")
    lines, names = upper[0].get_legend_handles_labels()
    figure.legend(
        lines, names, loc="outside upper center", ncols=4, frameon=False,
        fontsize=plot_style.SMALL,
    )  # fmt: skip
    title, (task, _, comparison) = list(results.items())[-1]
    draw_gradients(lower, task, comparison)
    lower.set_title(f"{title}: gradients with clipped cotangents")
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
        axes.plot(rates * shift, mean, label=arm.name, **style)
        losses = np.minimum(arm.losses, top)
        positions = np.full(len(losses), arm.setting.rate * shift)
        axes.plot(positions, losses, "o", ms=5, mew=0, alpha=0.7, **style)
    axes.axhspan(task.learned, top, color=plot_style.SHADE, lw=0, zorder=0)
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
    axes.axhline(1, color=plot_style.BASELINE, ls="--")
    remark(axes, 0.6, 1.3, "above: larger than unclipped")
    axes.set(xscale="log", yscale="log", xlabel="norm of the unclipped gradient")
    axes.set_ylabel("norm, relative to unclipped")
    # Room for the legend below the points.
    axes.set_ylim(axes.get_ylim()[0] / 5, max(axes.get_ylim()[1], 1.15))
    label_plainly(axes.xaxis)
    label_plainly(axes.yaxis)
    plot_style.finish(axes)
    legend = axes.legend(
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=plot_style.SMALL,
        markerscale=2,
        columnspacing=1.5,
        handletextpad=0.2,
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)


def remark(axes: Axes, x: float, y: float, text: str) -> None:
    """Write above a value of y, from a fraction of the width."""
    axes.text(
        x, y, text, va="bottom", fontsize=plot_style.SMALL, color=plot_style.REMARK,
        transform=axes.get_yaxis_transform(),
    )  # fmt: skip


def label_plainly(axis: Axis) -> None:
    """Set ticks at 1, 2, 5, 10, ... or, for a wide range, at powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())
