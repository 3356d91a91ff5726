"""Two pictures: bars of the clip against others, and compile seconds by leaves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks import verdicts
from benchmarks.timing import ratio, spread

# Okabe and Ito's colours, told apart by colour-blind eyes; hatches do it in print.
OTHERS = (
    ("optax", "#D55E00", ""),
    ("PyTorch", "#56B4E9", "//"),
    ("TensorFlow", "#009E73", ".."),
)
LINES = {
    ("optclip", "norm"): ("#0072B2", "o", "--"), ("optclip", "clip"): ("#0072B2", "s", "-"),
    ("optax", "norm"): ("#D55E00", "^", "--"), ("optax", "clip"): ("#D55E00", "v", "-"),
}  # fmt: skip
KINDS = {"equal": "leaves of 64", "assorted": "mixed small leaves"}


def save(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures there are measurements for."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = data["machines"][0]["backend"]
    saved = []
    for name, draw in (("clip", clip_bars), ("compile", compile_lines)):
        figure = draw(data)
        if figure is not None:
            path = folder / f"performance_{name}_{backend}.png"
            figure.savefig(path, dpi=130)
            saved.append(path)
    return saved


def clip_bars(data: Mapping[str, Any]) -> Figure | None:
    """How many times slower others clip, for each tree and dtype."""
    found = verdicts.cases(data, "clip", what="clip")
    titles = list(dict.fromkeys(case["title"] for case in found))
    if not titles:
        return None
    figure = Figure(figsize=(8, 1.0 + 2.0 * len(titles)), layout="constrained")
    panels = figure.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0]
    for axes, title in zip(panels, titles, strict=True):
        _panel(axes, [case for case in found if case["title"] == title], title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    panels[-1].set_xlabel(
        "time over optclip's (log scale; right of 1, optclip is faster)"
    )
    return figure


def _panel(axes: Axes, found: list[Any], title: str) -> None:
    """The bars of one tree, from 1 to the ratio, with its quartiles."""
    for i, (name, colour, hatch) in enumerate(OTHERS):
        drawn = [
            (row + 0.27 * (i - 1), ratio(theirs, ours))
            for row, case in enumerate(found)
            if (theirs := verdicts.seconds(case["rows"], name))
            and (ours := verdicts.seconds(case["rows"], "optclip"))
        ]
        places = [place for place, _ in drawn]
        middle = [each.median for _, each in drawn]
        errors = [
            [each.median - each.low for _, each in drawn],
            [each.high - each.median for _, each in drawn],
        ]
        axes.barh(
            places, [m - 1 for m in middle], 0.25, left=1, xerr=errors if drawn else None, label=name,
            color=colour, hatch=hatch, edgecolor="black", linewidth=0.5,
            error_kw={"linewidth": 1},
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, axes.get_xlim()[0]), max(2, axes.get_xlim()[1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(_few))
    axes.set_yticks(range(len(found)), [case["dtype"] for case in found])
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")


def _few(x: float, _: Any) -> str:
    """Labels between powers of ten at 2 and 5 only."""
    return f"{x:g}" if f"{x:e}"[0] in "25" else ""


def compile_lines(data: Mapping[str, Any]) -> Figure | None:
    """Seconds to trace, lower and compile against the number of leaves."""
    kinds = [kind for kind in KINDS if verdicts.cases(data, "compile", tree=kind)]
    if not kinds:
        return None
    figure = Figure(figsize=(4.6 * len(kinds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        ticks: set[int] = set()
        for (name, what), (colour, marker, style) in LINES.items():
            found = verdicts.cases(data, "compile", tree=kind, what=what, dtype="f32")
            points = sorted(
                (int(case["leaves"]), spread(samples).median)
                for case in found
                if (samples := verdicts.seconds(case["rows"], name))
            )
            ticks |= {leaves for leaves, _ in points}
            axes.plot(
                *zip(*points, strict=True) if points else ([], []), color=colour,
                marker=marker, linestyle=style, label=f"{name}, {what}",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted(ticks), [f"{each:,}" for each in sorted(ticks)])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_few))
        axes.set_xlabel(f"number of {KINDS[kind]}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds to compile")
    panels[0].legend()
    return figure
