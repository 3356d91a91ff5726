"""Plot the results of `train_gpt.py`: training losses, and optclip's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import plot_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_gpt import Run

COLORS = plot_style.BASELINE, plot_style.ORANGE, plot_style.YELLOW, plot_style.BLUE
DECAY = 0.7  # For the running mean of the losses.
HEADROOM = 0.7  # Space for the legend, as a fraction of the range of losses.


def draw(runs: Mapping[str, Run], corrupted: np.ndarray) -> Figure:
    """Draw the losses of all runs, and below them the record of the last."""
    figure = plot_style.figure(5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 3))
    draw_losses(upper, runs, corrupted)
    draw_record(lower, list(runs.values())[-1], corrupted)
    lower.set(xlabel="step", xlim=(0, len(corrupted)))
    return figure


def shade(axes: Axes, corrupted: np.ndarray, top: float) -> None:
    """Shade the steps with corrupted batches up to a fraction of the height."""
    edges = np.flatnonzero(np.diff(corrupted, prepend=False, append=False))
    for first, end in edges.reshape(-1, 2):
        axes.axvspan(first, end, ymax=top, color=plot_style.SHADE, lw=0, zorder=0)


def draw_losses(axes: Axes, runs: Mapping[str, Run], corrupted: np.ndarray) -> None:
    """Draw the running mean of the losses of intact batches, over steps and seeds."""
    steps, intact = np.arange(len(corrupted)), np.flatnonzero(~corrupted)
    means = []
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        # NaN interrupts the lines where batches are corrupted.
        mean = np.full(len(steps), np.nan)
        mean[intact] = running_mean(run.losses[:, intact].mean(axis=0))
        # The line of `optclip.skip` nearly coincides with this one.
        wide = 3.5 if color == plot_style.YELLOW else None
        axes.plot(steps, mean, color=color, label=name, lw=wide)
        means.append(mean)
    # The first losses are those of an untrained network.
    lowest, highest = np.nanmin(means), np.nanmax(np.array(means)[:, len(steps) // 8 :])
    axes.set_ylim(lowest - 0.25, highest + HEADROOM * (highest - lowest))
    shade(axes, corrupted, top=0.62)
    axes.text(
        np.flatnonzero(corrupted)[0] - 0.01 * len(steps), lowest - 0.2, "shaded:\ncorrupted batches",
        ha="right", fontsize=plot_style.SMALL, color=plot_style.REMARK,
    )  # fmt: skip
    axes.set(title="Training loss of a small GPT", ylabel="nats per character")
    plot_style.finish(axes, legend="upper right")


def draw_record(axes: Axes, run: Run, corrupted: np.ndarray) -> None:
    """Draw the loss of each step of the first seed with its learned threshold."""
    losses, limits, skipped = run.losses[0], run.thresholds[0], run.skipped[0]
    steps = np.arange(len(losses))
    blue, gray = plot_style.BLUE, "0.45"
    axes.plot(steps[~skipped], losses[~skipped], ".", ms=3, color=gray, label="loss")
    axes.plot(steps, limits, color=blue, label="learned threshold")
    axes.plot(
        steps[skipped], losses[skipped], "x", ms=5, color=plot_style.ORANGE,
        label="skipped",
    )  # fmt: skip
    visible = losses[len(losses) // 20 :]
    axes.set_ylim(visible.min() - 0.2, visible.max() + 0.35 * np.ptp(visible))
    shade(axes, corrupted, top=0.82)
    axes.set(title="Record of optclip.skip", ylabel="loss of each batch")
    plot_style.finish(axes)
    axes.legend(frameon=False, loc="upper right", ncols=3, fontsize=plot_style.SMALL)


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Return the exponential running mean over the steps."""
    means = losses.copy()
    for i in range(1, len(losses)):
        means[i] = DECAY * means[i - 1] + (1 - DECAY) * losses[i]
    return means
