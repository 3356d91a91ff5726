"""Plot the results of `train_char_rnn.py`: final loss against learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import plot_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_char_rnn import Sweep

COLORS = (
    plot_style.BASELINE, plot_style.YELLOW, plot_style.BLUE, plot_style.GREEN,
    plot_style.PINK, plot_style.ORANGE,
)  # fmt: skip
# In nats. Losses above the top are drawn at the top.
BOTTOM, TOP = 2.0, 3.7


def draw(panels: Mapping[str, Sequence[Sweep]], unigram_loss: float) -> Figure:
    """Draw a panel per experiment: seeds as points, and their mean as a line."""
    every = [sweep for sweeps in panels.values() for sweep in sweeps]
    methods = dict.fromkeys(sweep.method for sweep in every)
    colors = dict(zip(methods, COLORS, strict=False))
    figure = plot_style.figure(6.8)
    column = figure.subplots(len(panels), 1)
    for axes, (title, sweeps) in zip(column, panels.items(), strict=True):
        rates = sweeps[0].rates
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [str(Fraction(rate)) for rate in rates])
        axes.minorticks_off()
        axes.set(title=title, xlabel="learning rate", ylim=(BOTTOM, TOP))
        axes.set_ylabel("loss, nats per character")
        axes.axhspan(unigram_loss, TOP, color=plot_style.SHADE, lw=0, zorder=0)
        for sweep in sweeps:
            draw_sweep(axes, sweep, colors[sweep.method], unigram_loss)
        plot_style.finish(axes)
    style = {"frameon": False, "fontsize": plot_style.SMALL}
    below_band = (0.0, (unigram_loss - BOTTOM) / (TOP - BOTTOM))
    column[0].legend(loc="upper left", bbox_to_anchor=below_band, **style)
    column[-1].legend(loc="lower left", **style)
    column[0].text(
        0.02, unigram_loss + 0.05, "not learned",
        color=plot_style.REMARK, fontsize=plot_style.SMALL,
        transform=column[0].get_yaxis_transform(),
    )  # fmt: skip
    return figure


def draw_sweep(axes: Axes, sweep: Sweep, color: str, unigram_loss: float) -> None:
    """Draw seeds as points and their mean as a line.

    The line ends at the first rate above the best at which the networks do not learn.
    """
    losses = np.minimum(sweep.losses, TOP)
    mean = losses.mean(axis=1)
    learns = mean < unigram_loss
    past = np.flatnonzero(~learns & (np.arange(len(mean)) > mean.argmin()))
    end = past[0] + 1 if len(past) and learns.any() else len(mean)
    style = {"color": color, "clip_on": False}
    axes.plot(sweep.rates[:end], mean[:end], label=sweep.method, **style)
    axes.plot(sweep.rates[:end], losses[:end], "o", ms=4, mew=0, alpha=0.6, **style)
