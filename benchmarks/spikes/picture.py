"""One picture: how each method ended, every seed a dot, the models side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.spikes import record
from benchmarks.spikes.record import Row

# Okabe and Ito's, told apart by colour-blind eyes, and dark and light in print.
DOTS, PLAIN = "#56B4E9", "#D55E00"
DOT = {"marker": "o", "ms": 6, "mec": "black", "mew": 0.5, "ls": "", "alpha": 0.9}
MEDIAN = {"marker": "|", "ms": 15, "mec": "black", "mew": 2, "ls": ""}
BEYOND = {"marker": ">", "ms": 7, "mfc": "black", "mec": "black", "ls": ""}
CALM = {"color": "0.35", "lw": 1, "ls": "--"}


def draw(data: Mapping[str, Any]) -> Figure:
    """A row for each method, the best on average on top."""
    order = list(record.mean_ranks(data))
    names = record.models(data)
    figure = Figure(figsize=(9, 1.3 + 0.27 * len(order)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, names, strict=True):
        _panel(axes, data, model, order)
    panels[0].set_yticks(range(len(order)), [record.title(each) for each in order])
    panels[0].invert_yaxis()
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axes: Axes, data: Mapping[str, Any], model: str, order: list[str]) -> None:
    """The dots and medians of one model."""
    rows = {record.key(row): row for row in record.ranked(data, model)}
    low, edge = _limits(list(rows.values()), data["unigram_loss"])
    calm = record.reference(data, model)
    if calm:
        axes.axvline(record.final(calm).median, **CALM)
        low = min(low, record.final(calm).low)
    margin = 0.04 * (edge - low)
    for place, name in enumerate(order):
        if place % 2 == 0:
            axes.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
        _line(axes, place, rows[name], edge)
    axes.set_xlim(low - margin, edge + margin)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_title(data["models"][model], fontsize="medium")
    axes.set_xlabel("held-out loss, nats per character")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _limits(rows: list[Row], unigram_loss: float) -> tuple[float, float]:
    """The lowest loss, and where the picture is cut off on the right.

    That is a little above the third quartile of all, so that one method that learns
    nothing does not press all others together.
    """
    losses = np.array([float(x) for row in rows for x in row["held_out"]])
    sound = losses[losses <= unigram_loss]
    if not sound.size:
        return unigram_loss - 1, unigram_loss
    low, third = sound.min(), np.quantile(sound, 0.75)
    return float(low), float(min(sound.max(), low + 2.5 * (third - low)))


def _line(axes: Axes, place: int, row: Row, edge: float) -> None:
    """One method: a dot for each seed, or a mark at the edge, and their median."""
    losses = np.array([float(x) for x in row["held_out"]])
    inside = losses[losses <= edge]
    face = PLAIN if row["method"] == "no clip" else DOTS
    axes.plot(inside, np.full(len(inside), place), **DOT, mfc=face, zorder=3)
    median = record.final(row).median
    if median <= edge:
        axes.plot([median], [place], **MEDIAN, zorder=4)
    if beyond := len(losses) - len(inside):
        axes.plot([edge], [place], **BEYOND, zorder=4, clip_on=False)
        axes.text(edge, place, f"   {beyond}", va="center", fontsize="small")


def _legend() -> list[Line2D]:
    """What the marks are."""
    return [
        Line2D([], [], **CALM, label="no clip, no spikes (median)"),
        Line2D([], [], **DOT, mfc=DOTS, label="a seed"),
        Line2D([], [], **MEDIAN, label="median"),
        Line2D([], [], **BEYOND, label="so many seeds beyond the edge, or NaN"),
    ]
