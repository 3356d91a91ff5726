"""Limit the equations, imports and lines of the package."""

import subprocess
import sys

import pytest

from benchmarks import weight

# Functions that exceed the goal, with their number of equations.
MISSED = {
    "clip_by_norm(axis=0)": 120,
    "functional.global_norm": 30,
    # The choice of a barrier by platform takes three equations.
    "functional.clip_by_global_norm": 53,
}


@pytest.mark.parametrize("name", weight.EQUATIONS)
def test_clipping_one_leaf_traces_few_equations(name):
    _, goal = weight.EQUATIONS[name]
    # Plus a tenth, since other versions of JAX trace a few more equations.
    assert 0 < weight.equations(name) <= 1.1 * MISSED.get(name, goal)


@pytest.fixture(scope="module")
def printed():
    """Return the lazy modules that were imported, and the number of devices."""
    code = """
import sys, jax, optax, optclip
from optclip import thresholds
assert optclip.plot and optclip.keras
print({"jax.experimental.sparse", "matplotlib", "keras"} & {*sys.modules})
optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(1e-3))
optclip.clip_by_norm(thresholds.ema(), record=False)
optclip.clip_by_singular_value(1.0, response="smooth")
optclip.skip(optax.adam(1e-3), max_norm=1.0)
jax.config.update("jax_num_cpu_devices", 2)
print(len(jax.devices()))
"""
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_imports_for_sparse_leaves_and_plots_are_lazy(printed):
    """Importing these takes longer than importing optclip."""
    assert printed[0] == "set()"


def test_factory_initializes_no_device(printed):
    """A program may set `jax_num_cpu_devices` after it has built its optimizer."""
    assert printed[1:] == ["2"]
