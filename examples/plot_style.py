"""Style that the plots of the examples and the documentation share with `optclip.plot`.

Panels are stacked, so that labels stay legible if a phone shows a plot at its full
width.
"""

from __future__ import annotations

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colors, which color-blind readers and printers distinguish.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PINK, YELLOW, SKY = "#CC79A7", "#E69F00", "#56B4E9"
# Unclipped runs, which others are compared with, and remarks.
BASELINE, REMARK, SHADE = "#444444", "#555555", "#E8E8E8"
WIDTH, DPI = 5.4, 120  # In inches, and per inch.
SMALL = 9.0  # In points.


def figure(height: float) -> Figure:
    """Create a figure. Without pyplot it needs no display."""
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


Corner = Literal["upper left", "upper right", "lower left", "lower right"]


def finish(
    axes: Axes, *, legend: Corner | None = None, grid: Literal["both", "y"] = "both"
) -> None:
    """Draw the grid behind the data, and a legend at a corner."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis=grid, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        axes.legend(loc=legend, frameon=False, fontsize=SMALL)
