"""Plot the results of `train_char_rnn.py`: final loss against learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_char_rnn import Sweep

# Okabe and Ito's colors, which color-blind readers and printers distinguish.
COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00")
# In nats. Losses above the top are drawn at the top.
BOTTOM, TOP = 2.0, 3.7


def draw(panels: Mapping[str, Sequence[Sweep]], unigram_loss: float) -> Figure:
    """Draw a panel per experiment. Without pyplot they need no display."""
    every = [sweep for sweeps in panels.values() for sweep in sweeps]
    methods = dict.fromkeys(sweep.method for sweep in every)
    colors = dict(zip(methods, COLORS, strict=False))
    figure = Figure(figsize=(11, 5), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, width_ratios=(4, 3))
    for axes, (title, sweeps) in zip(grid, panels.items(), strict=True):
        axes.set_title(title, loc="left", pad=36, weight="bold")
        axes.set_xscale("log", base=2)
        rates = sweeps[0].rates
        axes.set_xticks(rates, [str(Fraction(rate)) for rate in rates])
        axes.minorticks_off()
        axes.set(ylim=(BOTTOM, TOP), xlabel="learning rate")
        axes.axhspan(unigram_loss, TOP, color="0.92", lw=0, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        names_at: Counter[tuple[float, float]] = Counter()
        for sweep in sweeps:
            x, y = draw_sweep(axes, sweep, colors[sweep.method], unigram_loss)
            axes.annotate(
                sweep.method, (x, y), (0, 7 + 13 * names_at[x, y]), fontsize="small",
                textcoords="offset points", ha="center", color=colors[sweep.method],
            )  # fmt: skip
            names_at[x, y] += 1
    grid[0].set_ylabel(
        "held-out loss, nats per character\n(points: seeds, line: their mean)"
    )
    grid[0].text(
        0.01, unigram_loss + 0.02, "not learned: no better\nthan letter frequencies",
        color="0.35", fontsize="small", transform=grid[0].get_yaxis_transform(),
    )  # fmt: skip
    return figure


def draw_sweep(
    axes: Axes, sweep: Sweep, color: str, unigram_loss: float
) -> tuple[float, float]:
    """Draw seeds as points and their mean as a line; return the position of the label.

    The line ends at the first rate above the best at which the networks do not learn.
    If they learn at no rate, the label is at the start of the line.
    """
    losses = np.minimum(sweep.losses, TOP)
    mean = losses.mean(axis=1)
    learns = mean < unigram_loss
    past = np.flatnonzero(~learns & (np.arange(len(mean)) > mean.argmin()))
    end = past[0] if len(past) and learns.any() else len(mean) - 1
    rates = sweep.rates[: end + 1]
    style = {"color": color, "clip_on": False}
    axes.plot(rates, mean[: end + 1], lw=2, **style)
    axes.plot(rates, losses[: end + 1], "o", ms=4, mew=0, alpha=0.6, **style)
    if not learns.any():
        return float(rates[0]), TOP
    return float(rates[-1]), float(mean[end]) if learns[end] else TOP
