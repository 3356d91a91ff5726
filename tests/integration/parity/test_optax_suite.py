"""Run optax's own tests with optclip's clipping instead of optax's."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_optax_suite_with_optclip_passes():
    # In a separate process, since it replaces functions of optax.
    module = "tests.integration.parity.optax_with_optclip"
    command = [sys.executable, "-m", module]
    process = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
