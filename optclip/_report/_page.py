"""Write a report as one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from typing import Any

import numpy as np

from .._monitor import clips_in, fields_by_name
from .._plot import distribution, heatmap, losses, norms, rate, steps_in
from ._report import Norm, Report, phrase, text_of

# Of several groups or leaves, those with the largest norms have a plot of their own.
_MOST = 3
# Inches at 96 dots each, the width of a phone's page.
_WIDTH, _HEIGHT = 3.7, 2.7
_STYLE = {
    "font.size": 9.0, "axes.titlesize": 9.0, "legend.fontsize": 8.0,
    # Agg draws a line of more points in chunks, since their number is limited.
    "agg.path.chunksize": 10_000, "axes.formatter.limits": (-4, 5),
    # Names may have a dollar sign.
    "text.parse_math": False,
}  # fmt: skip
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 74rem;
  padding: 1rem; }}
pre {{ white-space: pre-wrap; }}
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
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "--html requires Matplotlib, which is not installed. Install it with pip"
            " install matplotlib."
        )


def page_of(report: Report, version: str) -> str:
    """Return the page: the text of the report, and plots."""
    import matplotlib as mpl

    # The settings of the user, such as a dark style, would not fit the page.
    settings: Any = {**mpl.rcParamsDefault, **_STYLE}
    with mpl.rc_context(settings), warnings.catch_warnings():
        # The text of the page has the characters that Matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph")
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
    names = fields_by_name(columns)
    if "loss" in columns:
        yield "loss at each step", partial(losses, columns), "The loss over the steps."
    for i, norm in enumerate(report.norms):
        if drawn[:i].count(norm.name) < _MOST:
            yield from _plots_of(report, norm)
    for name in clips_in(names):
        norm_of_part = names[name]["norm"]
        if name not in drawn and [*norm_of_part] == [""]:
            yield (
                f"{name}: norm at each step",
                partial(norms, columns, clip=name),
                "Norms over the steps, in skipped steps too.",
            )
        count = len({*norm_of_part, *names[name].get("leaf_norm", {})} - {""})
        if count > 1:
            yield (
                f"{name}: norm of each part",
                partial(heatmap, columns, clip=name),
                f"The norms of {count} groups or leaves over the steps.",
            )


def _plots_of(report: Report, norm: Norm) -> Iterator[tuple[str, Draw, str]]:
    columns, part, suggestion = report.log.columns, norm.part, norm.suggestion
    words, clipped = "norm at each step", "fraction of steps clipped"
    if norm.threshold is None:
        if suggestion is None:
            return
        # A run without clipping has nothing else to draw.
        columns, part = _planned(columns, norm, suggestion.max_norm), None
        limit = f"{suggestion.max_norm:.9g}"
        words, clipped = (
            f"norm, if clipped at {limit}",
            f"fraction that {limit} would clip",
        )
    plots = {words: norms}
    if norm.part is None:
        plots |= {clipped: rate, "distribution": distribution}
    for title, plot in plots.items():
        draw = partial(plot, columns, clip=norm.name, part=part)
        yield f"{norm.label}: {title}", draw, f"{title.capitalize()}: {phrase(norm)}."


def _planned(
    columns: dict[str, np.ndarray], norm: Norm, limit: float
) -> dict[str, np.ndarray]:
    """Return the record of a run that clips at the suggested threshold."""
    x = fields_by_name(columns)[norm.name]["norm"][norm.part or ""]
    scaled = np.divide(limit, x, out=np.ones_like(x), where=x > limit)
    return {
        "step": steps_in(columns).at,
        f"{norm.name}/norm": x,
        f"{norm.name}/threshold": np.full_like(x, limit),
        f"{norm.name}/coefficient": scaled,
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
    else:
        # Inside such small axes it would hide some numbers.
        place = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.0), "ncols": 4}
        entries = ax.get_legend_handles_labels()
        ax.legend(*entries, **place, frameon=False, columnspacing=1.0, handlelength=1.5)
    stream = io.BytesIO()
    FigureCanvasAgg(canvas).print_png(stream)
    png = base64.b64encode(stream.getvalue()).decode()
    return _FIGURE.format(title=escape(title), text=escape(text), png=png)
