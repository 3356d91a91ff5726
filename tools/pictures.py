"""Extract the plots of `docs/monitoring_and_plots.md` from the notebook of methods.

A line of a cell that ends in `# plot_norms.png` names the picture below it.
`python -m tools.pictures` takes them out; `tests/docs/test_docs.py` compares the page with them.
"""

import base64
import pathlib
import re

import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "07_choosing_a_method.ipynb"
IMAGES = ROOT / "docs" / "images"


def named() -> dict[str, bytes]:
    """The pictures that the notebook keeps, by the names it gives them."""
    found = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        name = re.search(r"  # (plot_\w+\.png)$", cell.source, re.MULTILINE)
        for output in cell.get("outputs", []) if name else []:
            if "image/png" in output.get("data", {}):
                found[name[1]] = base64.b64decode(output["data"]["image/png"])
    return found


if __name__ == "__main__":
    for name, picture in named().items():
        (IMAGES / name).write_bytes(picture)
        print(name, len(picture) // 1000, "kB")
