"""Every kind of threshold; every trait in float64 and below its bound.

Every transformation in the other dtypes is in test_properties.py, and on leaves of
three dtypes in test_jax.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import covering, helpers
from tests.support.helpers import quick_jit
from tests.support.registry import SCALAR, by_trait

# The scope of the parameter puts the tests of one entry in a row, so that one worker
# runs them and compiles the clip once.
LIMITED = by_trait(SCALAR, "scope")
scalar, one_bound = (
    pytest.mark.parametrize(
        "entry", entries, ids=lambda entry: entry.id, scope="module"
    )
    for entries in (
        LIMITED,
        [e for e in LIMITED if e.id != "value-two-bounds"],
    )
)
TREE = helpers.mixed_gradients()
ZEROS = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), TREE)


@pytest.mark.covering(
    entry=by_trait(),
    run=covering.RUNS,
    # An eager run compiles each operation in a dtype that no other test has.
    where=lambda entry, run: run == "jit" or entry.scope == "tree",
)
def test_clip_of_float64_is_computed_in_float64(entry, run):
    with jax.enable_x64(True):
        tree = helpers.gradients(dtype=jnp.float64)
        tx = helpers.tx_without_promotion(entry.make())
        found = (quick_jit if run is helpers.optimized_jit else run)(
            lambda t: helpers.clipped(tx, t)
        )(tree)
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        expected = entry.expected(helpers.as_float64(tree))
        helpers.assert_close(found, expected, ulps=16 + entry.roundings)


THRESHOLDS = {
    "np.float64": np.float64,
    "np.float32": np.float32,
    "np.ndarray": np.asarray,
    "jnp.float32": jnp.float32,
    "jnp.bfloat16": jnp.bfloat16,
    "optax schedule": optax.constant_schedule,
    "function of the step": lambda c: lambda step: c + 0.0 * jnp.float32(step),
}


@functools.cache
def clips_at(entry):
    """Compile the clip of a tree at several kinds of threshold, one of them traced."""
    c = entry.threshold[1]
    names = list(THRESHOLDS)
    if not covering.full:
        # One per entry, so that neighbors take all.
        names = [names[LIMITED.index(entry) % len(names)]]

    def clips(tree, traced):
        limits = {name: THRESHOLDS[name](c) for name in names}
        limits |= {"traced": traced, "inf": np.inf, "zero": 0.0}
        found = {
            name: helpers.clipped(helpers.tx_without_promotion(entry.make(limit)), tree)
            for name, limit in limits.items()
        }
        halving = entry.make(optax.piecewise_constant_schedule(c, {1: 0.5}))
        found["step 0"], state = halving.update(tree, halving.init(tree))
        found["step 1"], _ = halving.update(tree, state)
        return found

    return quick_jit(clips)


@scalar
def test_threshold_of_every_kind_clips_at_its_value(entry):
    """A traced one of NaN gives NaN."""
    c = entry.threshold[1]
    found = clips_at(entry)(TREE, 0.5 * c)
    halved = {"traced", "step 1"}
    for name in found.keys() - {"inf", "zero"}:
        value = 0.5 * c if name in halved else c
        assert helpers.differs(found[name], TREE)
        expected = entry.expected(helpers.as_float64(TREE), value)
        helpers.assert_close(found[name], expected, ulps=4)
    found = helpers.as_float64(clips_at(entry)(TREE, np.nan)["traced"])
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(found))


@one_bound
def test_threshold_infinite_zero_or_negative(entry):
    """Infinite changes no bit, so that it can log a norm; zero or less gives zeros."""
    dtype = TREE["dense"]["bias"].dtype
    special = jax.device_put(np.array([np.nan, np.inf, 1e-40, -0.0], dtype))
    tree = {**TREE, "dense": {**TREE["dense"], "bias": special}}
    found = clips_at(entry)(tree, np.inf)
    helpers.assert_identical(found["inf"], tree)
    helpers.assert_identical(found["traced"], tree)
    found = clips_at(entry)(TREE, -1.0)
    for name in ("zero", "traced"):
        assert not any(np.any(x) for x in jax.tree.leaves(found[name]))
    helpers.assert_identical(clips_at(entry)(ZEROS, 0.0)["zero"], ZEROS)
