"""Run the clipping tests of other libraries with optclip in place of their functions."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("library", ["optax", "keras", "jax_privacy"])
def test_suite_of_library_fails_only_where_listed(library):
    # In a separate process, since it replaces functions of the library.
    command = [sys.executable, "-m", "tests.integration.peers.run", library]
    process = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
