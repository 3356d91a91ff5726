"""Run optax's own tests with optclip's clipping instead of optax's."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from .optax_with_optclip import SUITES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("record", [False, True])
def test_optax_suite_with_optclip_passes(record):
    if any(importlib.util.find_spec(suite) is None for suite in SUITES):
        pytest.skip("this optax was installed without its tests")
    # In a separate process, since it replaces functions of optax.
    module = "tests.integration.parity.optax_with_optclip"
    command = [sys.executable, "-m", module, str(record)]
    process = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
