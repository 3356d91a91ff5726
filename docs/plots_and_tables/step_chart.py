"""Draw the chart of docs/benchmarks.md: time and memory of an AdamW step of GPT-2.

`python -m docs.plots_and_tables.step_chart` writes `docs/images/adamw_step.png` from
the results in `benchmarks/results/cpu.json`.
"""

import json
import pathlib

import matplotlib as mpl
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "docs" / "images" / "adamw_step.png"
CONTENDERS = {"unclipped": "#999999", "optclip": "#0072b2", "optax": "#d55e00"}
SETTINGS = {
    ("float32", "made"): "float32",
    ("bfloat16", "made"): "bfloat16",
    ("float32", "arguments"): "float32,\nseparate jit",
    ("bfloat16", "arguments"): "bfloat16,\nseparate jit",
}


def main():
    mpl.use("agg")
    import matplotlib.pyplot as plt

    text = (ROOT / "benchmarks" / "results" / "cpu.json").read_text()
    rows = {
        (row["dtype"], row["gradients"], row["contender"]): row
        for row in json.loads(text)["step"]["rows"]
        if row["tree"] == "gpt2" and row["clip"] == "global norm"
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    places = np.arange(len(SETTINGS))
    for axes, key, title in (
        (panels[0], "over unclipped", "Time relative to the unclipped step"),
        (panels[1], "temporary MB", "Temporary memory in MB"),
    ):
        for i, (name, color) in enumerate(CONTENDERS.items()):
            heights = [rows[(*setting, name)][key] for setting in SETTINGS]
            bars = axes.bar(
                places + 0.27 * (i - 1), heights, 0.25, color=color, label=name
            )
            digits = "{:.2f}" if key == "over unclipped" else "{:.0f}"
            axes.bar_label(bars, fmt=digits, fontsize=8)
        axes.set_title(title)
        axes.set_xticks(places, list(SETTINGS.values()))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, loc="upper left")
    figure.suptitle("AdamW step of GPT-2 with global-norm clipping, on a CPU")
    figure.savefig(CHART, dpi=130)


if __name__ == "__main__":
    main()
