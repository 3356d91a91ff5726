"""Plot the results of `train_gpt.py`: training losses, and optclip's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_gpt import Run

# Okabe and Ito's colors, which color-blind readers and printers distinguish.
COLORS = ("#D55E00", "#0072B2", "#009E73")
DECAY = 0.7  # For the running mean of the losses.
HEADROOM = 0.3  # Space for the labels, as a fraction of the range of losses.


def draw(runs: Mapping[str, Run], corrupted: np.ndarray) -> Figure:
    """Draw both panels. Without pyplot they need no display."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    for axes in (left, right):
        shade(axes, corrupted)
        axes.set(xlabel="step", xlim=(0, len(corrupted)))
        axes.spines[["top", "right"]].set_visible(False)
    draw_losses(left, runs, corrupted)
    draw_record(right, list(runs.values())[-1])
    return figure


def shade(axes: Axes, corrupted: np.ndarray) -> None:
    """Shade the steps with corrupted batches."""
    edges = np.flatnonzero(np.diff(corrupted, prepend=False, append=False))
    for first, end in edges.reshape(-1, 2):
        axes.axvspan(first, end, color="0.88", lw=0, zorder=0)


def draw_losses(axes: Axes, runs: Mapping[str, Run], corrupted: np.ndarray) -> None:
    """Draw the running mean of intact batches' losses, with the range of seeds."""
    steps, intact = np.arange(len(corrupted)), np.flatnonzero(~corrupted)
    highest = 0.0
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        # NaN interrupts the lines where batches are corrupted.
        smooth = np.full_like(run.losses, np.nan)
        smooth[:, intact] = running_mean(run.losses[:, intact])
        low, high = smooth.min(axis=0), smooth.max(axis=0)
        axes.plot(steps, smooth.mean(axis=0), color=color, lw=1.6, label=name)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
        highest = max(highest, np.nanmax(high[steps > 0.3 * len(steps)]))
    lowest = min(run.losses[:, intact].min() for run in runs.values())
    axes.set_ylim(lowest, highest + HEADROOM * (highest - lowest))
    axes.set_ylabel(
        "training loss, nats per character\n(line: mean of seeds, band: range)"
    )
    axes.set_title(
        "Clipping softens corrupted batches, skipping removes them", loc="left"
    )
    axes.text(
        0.99, 0.03, "shaded: corrupted batches", transform=axes.transAxes, ha="right",
        fontsize="small", color="0.35",
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right", fontsize="small")


def draw_record(axes: Axes, run: Run) -> None:
    """Draw the loss of each step of the first seed with its learned threshold."""
    losses, limits, skipped = run.losses[0], run.thresholds[0], run.skipped[0]
    steps = np.arange(len(losses))
    axes.plot(steps[~skipped], losses[~skipped], ".", ms=3, color="0.45", label="loss")
    axes.plot(steps, limits, color=COLORS[2], lw=1.6, label="learned threshold")
    axes.plot(
        steps[skipped], losses[skipped], "x", ms=5, color=COLORS[0], label="skipped"
    )
    # The first losses are those of an untrained network.
    visible = losses[len(losses) // 20 :]
    axes.set_ylim(visible.min() - 0.2, visible.max() + 0.2 * np.ptp(visible))
    axes.set_ylabel("loss of the batch")
    axes.set_title("The record: losses, learned threshold, skipped steps", loc="left")
    axes.legend(frameon=False, loc="upper right", ncols=3, fontsize="small")


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Return the exponential running mean along the steps."""
    means = losses.copy()
    for i in range(1, losses.shape[1]):
        means[:, i] = DECAY * means[:, i - 1] + (1 - DECAY) * losses[:, i]
    return means
