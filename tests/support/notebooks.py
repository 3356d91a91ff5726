"""Notebooks that are run from top to bottom, each where its libraries are."""

import json
import os
import pathlib

import jax
import nbformat
from nbclient import NotebookClient

from tests.support import compiler, covering, notebook_claims

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
# Their libraries do not go together with those of the suite.
IN_STACKS = {"09_private_training"}


def named(stacks):
    """The notebooks that the suite runs, or those of the session of stacks."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    return [path for path in paths if (path.stem in IN_STACKS) == stacks]


def environment():
    """The cache of the suite, and no optimizations of XLA.

    What a notebook says has to hold however XLA makes the program, and to optimize it is
    most of what it costs.
    """
    flags = {} if covering.full else compiler.UNOPTIMIZED
    given = os.environ.get("XLA_FLAGS", "")
    return {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": " ".join(
            [given, *(f"--{name}={json.dumps(x)}" for name, x in flags.items())]
        ),
    }


def check(path, folder):
    """Run a notebook with a stored plot, then the claims about it."""
    notebook = nbformat.read(path, as_version=4)
    kinds = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    }
    assert "image/png" in kinds
    claims = notebook_claims.CLAIMS[path.stem]
    notebook.cells.append(nbformat.v4.new_code_cell(claims))
    client = NotebookClient(
        notebook,
        # How long a cell takes depends on what else the machine does.
        timeout=None,
        startup_timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": os.fspath(folder)}},
    )
    client.execute()
