"""What a clip weighs before it runs, as far as it is the same in each run."""

import subprocess
import sys

import pytest

from benchmarks import weight

# Where the goal is missed, as it is.
MISSED = {"clip_by_norm(axis=0)": 108}


@pytest.mark.parametrize("name", weight.EQUATIONS)
def test_equations_of_a_leaf(name):
    _, goal = weight.EQUATIONS[name]
    # And a tenth: another JAX writes the same in a few equations more.
    assert 0 < weight.equations(name) <= 1.1 * MISSED.get(name, goal)


def test_what_only_sparse_leaves_and_plots_need_is_imported_late():
    """It takes longer than all of optclip."""
    names = "{'jax.experimental.sparse', 'matplotlib'}"
    code = (
        f"import optclip, sys; assert optclip.plot; print({names} & {{*sys.modules}})"
    )
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found.strip() == "set()"


def test_building_a_clip_initializes_no_device():
    """A program may set `jax_num_cpu_devices` after it has built its optimizer."""
    code = """
import jax, optax, optclip
from optclip import thresholds
optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(1e-3))
optclip.clip_by_norm(thresholds.ema(), record=False)
optclip.clip_by_singular_value(1.0, response="soft")
optclip.skip(optax.adam(1e-3), max_norm=1.0)
jax.config.update("jax_num_cpu_devices", 2)
print(len(jax.devices()))
"""
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found.strip() == "2"
