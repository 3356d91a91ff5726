"""Draw the chart of docs/benchmarks.md: time and memory of an AdamW step of GPT-2.

`python -m docs.plots_and_tables.step_chart` writes `docs/images/adamw_step.png` from
the results in `benchmarks/results/cpu.json`.
"""

import json
import pathlib

import numpy as np

from examples import plot_style

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "docs" / "images" / "adamw_step.png"
CONTENDERS = {
    "unclipped": "#999999", "optclip": plot_style.BLUE, "optax": plot_style.ORANGE,
}  # fmt: skip
SETTINGS = {
    ("float32", "made"): "float32",
    ("bfloat16", "made"): "bfloat16",
    ("float32", "arguments"): "float32, from\nanother jit",
    ("bfloat16", "arguments"): "bfloat16, from\nanother jit",
}


def main():
    text = (ROOT / "benchmarks" / "results" / "cpu.json").read_text()
    rows = {
        (row["dtype"], row["gradients"], row["contender"]): row
        for row in json.loads(text)["step"]["rows"]
        if row.get("tree", "gpt2") == "gpt2"
    }
    figure = plot_style.figure(5.6)
    panels = figure.subplots(2, 1, sharex=True)
    places = np.arange(len(SETTINGS))
    for axes, key, title in (
        (
            panels[0],
            "over unclipped",
            "Time of an AdamW step on a CPU, relative to unclipped",
        ),
        (panels[1], "temporary MB", "Temporary memory in MB"),
    ):
        for i, (name, color) in enumerate(CONTENDERS.items()):
            heights = [rows[(*setting, name)][key] for setting in SETTINGS]
            bars = axes.bar(
                places + 0.27 * (i - 1), heights, 0.25, color=color, label=name,
                yerr=spread(rows, name, heights) if key == "over unclipped" else None,
                error_kw={"lw": 1, "ecolor": "0.3"},
            )  # fmt: skip
            digits = "{:.2f}" if key == "over unclipped" else "{:.0f}"
            axes.bar_label(bars, fmt=digits, fontsize=plot_style.SMALL, padding=1)
        axes.set_title(title)
        axes.set_xticks(places, list(SETTINGS.values()))
        axes.margins(y=0.1)
        plot_style.finish(axes, grid="y")
    plot_style.finish(panels[0], legend="upper left", grid="y")
    figure.savefig(CHART)


def spread(rows, name, heights):
    """Return the distances of quartiles from bars, in medians of unclipped steps."""
    quartiles = np.array([rows[(*s, name)]["quartiles"] for s in SETTINGS])
    unclipped = np.array([rows[(*s, "unclipped")]["ms"] for s in SETTINGS])
    low, high = quartiles.T / unclipped
    return np.maximum(0, [heights - low, high - heights])


if __name__ == "__main__":
    main()
