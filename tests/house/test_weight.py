"""Limit the equations of a call and the modules that an import loads."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import optclip
from optclip import functional, recipes

# The function or transformation, and the most equations that it traces for one leaf.
EQUATIONS = {
    "functional.global_norm": (functional.global_norm, 30),
    # The choice of a barrier by platform takes three of them.
    "functional.clip_by_global_norm": (
        lambda x: functional.clip_by_global_norm(x, 1.0),
        53,
    ),
    "clip_by_global_norm": (optclip.clip_by_global_norm(1.0), 85),
    "clip_by_norm(axis=0)": (optclip.clip_by_norm(1.0, axis=0), 120),
    "recipes.agc": (recipes.agc(0.01), 150),
    "recipes.zclip": (recipes.zclip(), 180),
}


def equations(jaxpr):
    """Count equations, also nested ones, for one platform."""
    total = 0
    for eqn in jaxpr.eqns:
        values = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
        programs = [getattr(each, "jaxpr", each) for each in values]
        inner = [equations(each) for each in programs if hasattr(each, "eqns")]
        # A program for one platform has one of the branches for several.
        is_one = eqn.params.get("branches_platforms") is not None
        total += 1 + (max(inner) if is_one else sum(inner))
    return total


@pytest.mark.parametrize("name", EQUATIONS)
def test_clipping_one_leaf_traces_few_equations(name):
    clip, most = EQUATIONS[name]
    x = jnp.ones((64, 64))
    if isinstance(clip, optax.GradientTransformation):
        jaxpr = jax.make_jaxpr(clip.update)(x, clip.init(x), x)
    else:
        jaxpr = jax.make_jaxpr(clip)(x)
    # Plus a tenth, since other versions of JAX trace a few more equations.
    assert 0 < equations(jaxpr.jaxpr) <= 1.1 * most


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
