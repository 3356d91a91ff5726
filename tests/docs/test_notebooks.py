"""Every notebook runs from top to bottom, and keeps its pictures."""

import json
import os
import pathlib
import re

import jax
import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import covering, helpers

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def environment():
    """The cache of the suite, and no optimizations of XLA.

    What a notebook says has to hold however XLA makes the program, and to optimize it is
    most of what it costs.
    """
    flags = {} if covering.full else helpers.UNOPTIMIZED
    given = os.environ.get("XLA_FLAGS", "")
    return {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": " ".join(
            [given, *(f"--{name}={json.dumps(x)}" for name, x in flags.items())]
        ),
    }


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_asserts_are_in_cells_that_the_site_hides(path):
    shown = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        and "remove-cell" not in cell.metadata.get("tags", [])
    ]
    assert not [code for code in shown if re.search(r"^\s*assert ", code, re.MULTILINE)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The client's own socket and event loop clean-up warns on some platforms.
@pytest.mark.filterwarnings("ignore")
def test_notebook(path, monkeypatch, tmp_path):
    for name, value in {"IPYTHONDIR": str(tmp_path), **environment()}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    kinds = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    }
    assert "image/png" in kinds
    client = NotebookClient(
        notebook,
        # How long a cell takes depends on what else the machine does.
        timeout=None,
        startup_timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": os.fspath(tmp_path)}},
    )
    client.execute()
