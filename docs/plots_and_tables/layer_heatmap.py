"""Draw the heatmap of `docs/scanned_layers.md` by running its code.

`python -m docs.plots_and_tables.layer_heatmap` writes `docs/images/layers_heatmap.png`.
"""

import pathlib
import re

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

DOCS = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the block that draws the plot, and save it."""
    text = (DOCS / "scanned_layers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(next(code for code in blocks if "plot.heatmap" in code), {})
    plt.savefig(DOCS / "images" / "layers_heatmap.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
