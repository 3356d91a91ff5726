"""Run notebooks from top to bottom."""

import os
import pathlib

import jax
import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
# Their libraries conflict with the suite's.
IN_STACKS = {"09_private_training"}


def named(stacks):
    """Return the notebooks of the nox session `stacks`, or all others."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    return [path for path in paths if (path.stem in IN_STACKS) == stacks]


def check(path, folder, monkeypatch):
    """Run a notebook that stores a plot.

    XLA does not optimize, since the kernel has the environment of the suite.
    """
    for name, value in {
        "IPYTHONDIR": str(folder),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }.items():
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
        # The time of a cell depends on the load of the machine.
        timeout=None,
        startup_timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": os.fspath(folder)}},
    )
    client.execute()
