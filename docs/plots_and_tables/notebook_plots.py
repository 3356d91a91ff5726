"""Extract the plots of `docs/monitoring_and_plots.md` from a notebook.

A line such as `plot.norms(...)  # plot_norms.png` names the plot of its cell.
`python -m docs.plots_and_tables.notebook_plots` writes the files.
"""

import base64
import pathlib
import re

import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "07_choosing_a_method.ipynb"
IMAGES = ROOT / "docs" / "images"


def named_plots() -> dict[str, bytes]:
    """Return the plots in the notebook by name."""
    plots = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        name = re.search(r"  # (plot_\w+\.png)$", cell.source, re.MULTILINE)
        for output in cell.get("outputs", []) if name else []:
            if "image/png" in output.get("data", {}):
                plots[name[1]] = base64.b64decode(output["data"]["image/png"])
    return plots


if __name__ == "__main__":
    for name, plot in named_plots().items():
        (IMAGES / name).write_bytes(plot)
        print(name, len(plot) // 1000, "kB")
