"""Limit the equations of a call and the modules that an import loads."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import optclip
from optclip import functional, recipes
from tests.support import helpers

# The function or transformation, and the most equations that it traces for one leaf,
# also those of other platforms.
EQUATIONS = {
    "functional.global_norm": (functional.global_norm, 54),
    "functional.clip_by_global_norm": (
        lambda x: functional.clip_by_global_norm(x, 1.0),
        77,
    ),
    "clip_by_global_norm": (optclip.clip_by_global_norm(1.0), 108),
    "clip_by_norm(axis=0)": (optclip.clip_by_norm(1.0, axis=0), 146),
    "recipes.agc": (recipes.agc(0.01), 184),
    "recipes.zclip": (recipes.zclip(), 203),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_clipping_one_leaf_traces_few_equations(name):
    clip, most = EQUATIONS[name]
    x = jnp.ones((64, 64))
    if isinstance(clip, optax.GradientTransformation):
        jaxpr = jax.make_jaxpr(clip.update)(x, clip.init(x), x)
    else:
        jaxpr = jax.make_jaxpr(clip)(x)
    # Plus a tenth, since other versions of JAX trace a few more equations.
    found = sum(1 for _ in helpers.equations(jaxpr.jaxpr))
    assert 0 < found <= 1.1 * most


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
