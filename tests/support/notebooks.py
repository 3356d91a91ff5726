"""Run notebooks from top to bottom."""

import copy
import os
import pathlib
import re

import jax
import nbformat
import numpy as np
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# Their libraries conflict with the suite's.
IN_STACKS = {"09_private_training"}


def named(stacks):
    """Return the notebooks of the nox session `stacks`, or all others."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    return [path for path in paths if (path.stem in IN_STACKS) == stacks]


def outputs(cell):
    """Return the printed text of a cell, and the number of its plots."""
    found = cell.get("outputs", [])
    data = [output.get("data", {}) for output in found]
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in found]
    return "".join(texts), sum("image/png" in each for each in data)


def compare(stored, fresh):
    """Compare outputs: numbers to 10%, those below 1e-4 by their order.

    A cell tagged "rounding" trains a model until rounding errors are large; XLA does
    not optimize here, since the kernel has the environment of the suite. There only
    the words are compared.
    """
    (old, old_plots), (new, new_plots) = outputs(stored), outputs(fresh)
    assert old_plots == new_plots
    words = [" ".join(NUMBER.sub("0", text).split()) for text in (old, new)]
    assert words[0] == words[1], new
    if "rounding" not in stored.metadata.get("tags", []):
        numbers = (np.float64(NUMBER.findall(text)) for text in (old, new))
        np.testing.assert_allclose(*numbers, rtol=0.1, atol=1e-5, err_msg=new)


def check(path, folder, monkeypatch):
    """Run a notebook that stores a plot, and compare its stored outputs."""
    for name, value in {
        "IPYTHONDIR": str(folder),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    stored = copy.deepcopy(notebook.cells)
    assert any(outputs(cell)[1] for cell in stored)
    client = NotebookClient(
        notebook,
        # The time of a cell depends on the load of the machine.
        timeout=None,
        startup_timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": os.fspath(folder)}},
    )
    client.execute()
    for old, new in zip(stored, notebook.cells, strict=True):
        compare(old, new)
