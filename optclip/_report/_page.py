"""Write a report as one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import numpy as np

from .._monitor import parts_in
from .._plot import distribution, heatmap, norms, rate, steps_in
from ._report import Norm, Report, key_of, phrase, text_of

# Of several groups or leaves, those with the largest norms have a plot of their own.
_MOST = 3
# Inches at 96 dots each, the width of a phone's page.
_WIDTH, _HEIGHT = 3.7, 2.7
_STYLE = {
    "font.size": 9.0, "axes.titlesize": 9.0, "legend.fontsize": 8.0,
    # Agg draws a line of more points in chunks, since their number is limited.
    "agg.path.chunksize": 10_000, "axes.formatter.limits": (-4, 5),
}  # fmt: skip
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 74rem;
  padding: 1rem; }}
pre {{ overflow-x: auto; }}
.plots {{ display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }}
figure {{ margin: 0; }}
img {{ height: auto; width: 100%; }}
</style></head>
<body>
<h1>{title}</h1>
<pre>{text}</pre>
<div class="plots">
{figures}
</div>
<p>Written by <code>python -m optclip report</code>, optclip {version}</p>
</body>
</html>
"""
_FIGURE = """\
<figure><figcaption>{title}</figcaption>
<img alt="{text}" src="data:image/png;base64,{png}"></figure>"""

Draw = Callable[..., Any]


def require_matplotlib() -> None:
    """Raise an error if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--html requires Matplotlib, which is not installed. Install it with pip"
            " install matplotlib."
        ) from error


def page_of(report: Report, version: str) -> str:
    """Return the page: the text of the report, and plots."""
    import matplotlib as mpl

    # The settings of the user, such as a dark style, would not fit the page.
    settings: Any = {**mpl.rcParamsDefault, **_STYLE}
    with mpl.rc_context(settings):
        figures = [*filter(None, (_figure(*each) for each in _plots(report)))]
    return _PAGE.format(
        title=escape(f"Gradient norms of {report.path.rpartition('/')[2]}"),
        text=escape(text_of(report)),
        figures="\n".join(figures),
        version=version,
    )


def _plots(report: Report) -> Iterator[tuple[str, Draw, str]]:
    """Yield the title, the function and the description of each plot."""
    columns, drawn = report.log.columns, [norm.name for norm in report.norms]
    for i, norm in enumerate(report.norms):
        if drawn[:i].count(norm.name) < _MOST:
            yield from _plots_of(report, norm)
    leaves = parts_in(columns, "leaf_norm")
    for name, parts in parts_in(columns).items():
        if name not in drawn and parts == [""]:
            draw = functools.partial(norms, columns, clip=name)
            text = "Norms over the steps, in skipped steps too."
            yield f"{name}: norm at each step", draw, text
        parts = [part for part in [*parts, *leaves.get(name, [])] if part]
        if len(parts) > 1:
            draw = functools.partial(heatmap, columns, clip=name)
            text = f"The norms of {len(parts)} groups or leaves over the steps."
            yield f"{name}: norm of each part", draw, text


def _plots_of(report: Report, norm: Norm) -> Iterator[tuple[str, Draw, str]]:
    columns, start, skipped = report.log.columns, norm.label, 0
    words, clipped = "norm at each step", "fraction of steps clipped"
    if norm.threshold is None:
        if norm.suggestion is None:
            return
        columns, limit = _planned(report, norm), f"{norm.suggestion.max_norm:.9g}"
        skipped = norm.suggestion.skipped
        words, clipped = (
            f"norm, if clipped at {limit}",
            f"fraction that {limit} would clip",
        )
    choice = {"clip": norm.name, "part": norm.part if norm.threshold else None}
    draw = functools.partial(norms, columns, **choice)
    yield f"{start}: {words}", draw, f"Norms over the steps: {phrase(norm)}."
    if norm.part is None:
        draw = functools.partial(rate, columns, **choice)
        yield f"{start}: {clipped}", draw, f"Clipped steps: {phrase(norm)}."
        # The threshold is drawn with the norms that it was chosen from.
        considered = {key: x[skipped:] for key, x in columns.items()}
        draw = functools.partial(distribution, considered, **choice)
        since = f" from step {considered['step'][0]:.0f}" if skipped else ""
        yield f"{start}: distribution{since}", draw, f"Histogram: {phrase(norm)}."


def _planned(report: Report, norm: Norm) -> dict[str, np.ndarray]:
    """Return the record of a run that clips at the suggested threshold.

    A run without clipping has nothing else to draw.
    """
    columns = report.log.columns
    x = columns[key_of(norm.name, "norm", norm.part)]
    limit = norm.suggestion.max_norm if norm.suggestion else np.inf
    return {
        "step": steps_in(columns).at,
        f"{norm.name}/norm": x,
        f"{norm.name}/threshold": np.full_like(x, limit),
        f"{norm.name}/coefficient": np.divide(
            limit, x, out=np.ones_like(x), where=x > limit
        ),
    }


def _figure(title: str, draw: Draw, text: str) -> str | None:
    """Return a figure of the page, or None if no norm is finite and above 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = Figure((_WIDTH, _HEIGHT), dpi=200, layout="constrained")
    ax = canvas.add_subplot()
    try:
        draw(ax=ax)
    except ValueError:
        return None
    ax.set_title("")
    if ax.images:
        # The end of a path differs most.
        labels = [label.get_text()[-18:] for label in ax.get_yticklabels()]
        ax.set_yticks(range(len(labels)), labels, fontsize=7)
        canvas.set_figheight(max(_HEIGHT, 0.9 + 0.14 * len(labels)))
    elif ax.get_legend_handles_labels()[1]:
        # Inside such small axes it would hide some numbers.
        place = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.0), "ncols": 4}
        ax.legend(**place, frameon=False, columnspacing=1.0, handlelength=1.5)
    stream = io.BytesIO()
    FigureCanvasAgg(canvas).print_png(stream)
    png = base64.b64encode(stream.getvalue()).decode()
    return _FIGURE.format(title=escape(title), text=escape(text), png=png)
