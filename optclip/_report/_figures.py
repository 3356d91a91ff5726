"""Draw the plots of a report, narrow enough for a phone."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .._monitor import parts_in, percent
from .._plot import distribution, heatmap, norms, rate, steps_in
from ._report import Norm, Report, key_of
from ._text import phrase

# Of several groups or leaves, those with the largest norms have a plot of their own.
_MOST = 3
# At 96 dots per inch, the width of a phone's page.
_WIDTH, _HEIGHT = 3.7, 2.7
_FONTS = {"font.size": 9.0, "axes.titlesize": 9.0, "legend.fontsize": 8.0}
# Agg draws a line of more points in chunks, since their number is limited.
_STYLE = {**_FONTS, "agg.path.chunksize": 10_000, "axes.formatter.limits": (-4, 5)}
_LABEL = 18


class Figure(NamedTuple):
    """Hold an image, with a title and a description."""

    title: str
    png: bytes
    text: str


def require_matplotlib() -> None:
    """Raise an error if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--html requires Matplotlib, which is not installed. Install it with pip"
            " install matplotlib."
        ) from error


def figures_of(report: Report) -> list[Figure]:
    """Return the plots of each transformation."""
    import matplotlib as mpl

    # The settings of the user, such as a dark style, would not fit the page.
    settings: Any = {**mpl.rcParamsDefault, **_STYLE}
    with mpl.rc_context(settings):
        return [*_figures(report)]


def _figures(report: Report) -> Iterator[Figure]:
    drawn: dict[str, int] = {}
    for norm in report.norms:
        drawn[norm.name] = drawn.get(norm.name, 0) + 1
        if drawn[norm.name] <= _MOST:
            yield from _of_norm(report, norm)
    columns = report.log.columns
    leaves = parts_in(columns, "leaf_norm")
    for name, parts in parts_in(columns).items():
        if name not in drawn and parts == [""]:
            draw = partial(norms, columns, clip=name)
            text = "Norms over the steps, in skipped steps too."
            yield from _figure(f"{name}: norm at each step", draw, text)
        parts = [part for part in [*parts, *leaves.get(name, [])] if part]
        if len(parts) < 2:
            continue
        draw = partial(_heatmap, columns, clip=name)
        title = f"{name}: norm of each part"
        text = f"The norms of {len(parts)} groups or leaves over the steps."
        yield from _figure(title, draw, text, rows=min(len(parts), 60))


def _of_norm(report: Report, norm: Norm) -> Iterator[Figure]:
    columns, part, start = report.log.columns, norm.part, norm.label
    numbers = f"{phrase(norm)}."
    words, clipped, skipped = "norm at each step", "fraction of steps clipped", 0
    if norm.threshold is None and norm.suggestion is not None:
        columns, limit = _planned(report, norm), f"{norm.suggestion.max_norm:.9g}"
        skipped = norm.suggestion.skipped
        part, words = None, f"norm, if clipped at {limit}"
        clipped = f"fraction that {limit} would clip"
        fraction = percent(norm.suggestion.rate)
        numbers += f" The threshold {limit} would have clipped {fraction}."
    elif norm.threshold is None:
        return
    draw = partial(norms, columns, clip=norm.name, part=part)
    yield from _figure(f"{start}: {words}", draw, f"Norms over the steps: {numbers}")
    if norm.part is None:
        draw = partial(rate, columns, clip=norm.name)
        yield from _figure(f"{start}: {clipped}", draw, f"Clipped steps: {numbers}")
        # The threshold is drawn with the norms that it was chosen from.
        considered = {key: x[skipped:] for key, x in columns.items()}
        draw = partial(distribution, considered, clip=norm.name)
        title = f"{start}: distribution"
        first = int(columns["step"][skipped]) if skipped else 0
        title += f" from step {first}" if skipped else ""
        yield from _figure(title, draw, f"Histogram of the norms: {numbers}")


def _planned(report: Report, norm: Norm) -> dict[str, np.ndarray]:
    """Return the record of a run that clips at the suggested threshold.

    A run without clipping has nothing else to draw.
    """
    columns = report.log.columns
    x = columns[key_of(norm.name, "norm", norm.part)]
    limit = norm.suggestion.max_norm if norm.suggestion else np.inf
    coefficient = np.divide(limit, x, out=np.ones_like(x), where=x > limit)
    return {
        "step": steps_in(columns).at,
        f"{norm.name}/norm": x,
        f"{norm.name}/threshold": np.full_like(x, limit),
        f"{norm.name}/coefficient": coefficient,
    }


def _heatmap(columns: dict[str, np.ndarray], *, clip: str, ax: Any) -> None:
    heatmap(columns, clip=clip, ax=ax)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    # The end of a path differs most.
    short = [x if len(x) <= _LABEL else f"…{x[1 - _LABEL :]}" for x in labels]
    ax.set_yticks(range(len(short)), short, fontsize=7)


def _figure(
    title: str, draw: Callable[..., Any], text: str, rows: int = 0
) -> Iterator[Figure]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    height = max(_HEIGHT, 0.9 + 0.14 * rows)
    canvas = Canvas((_WIDTH, height), dpi=200, layout="constrained")
    ax = canvas.add_subplot()
    try:
        draw(ax=ax)
    except ValueError:
        return  # No norm is finite and above 0.
    ax.set_title("")
    if ax.get_legend_handles_labels()[1]:
        # Inside such small axes it would hide some numbers.
        place = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.0), "ncols": 4}
        ax.legend(**place, frameon=False, columnspacing=1.0, handlelength=1.5)
    stream = io.BytesIO()
    FigureCanvasAgg(canvas).print_png(stream)
    yield Figure(title, stream.getvalue(), text)
