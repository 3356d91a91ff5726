"""Thresholds from parameters, and rules of the gradients before an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers


def test_each_slice_is_clipped_to_a_ratio_of_its_parameters():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "b": np.zeros((2, 4))}
    updates = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    params, updates = (jax.tree.map(jnp.float32, x) for x in (params, updates))
    rule = thresholds.relative_to_params(0.1, 0.5)
    tx = optclip.clip_by(rule, over=optclip.axes(0))
    clipped, _ = helpers.quick_jit(tx.update)(updates, tx.init(params), params)
    for name, update in updates.items():
        size = np.linalg.norm(np.asarray(params[name], np.float64), axis=0)
        limit = 0.1 * np.maximum(size, 0.5)
        norm = np.linalg.norm(np.asarray(update, np.float64), axis=0)
        assert np.any(norm > limit)
        wanted = update * np.minimum(1, limit / norm)
        np.testing.assert_allclose(clipped[name], wanted, rtol=1e-5)


def test_parameters_are_asked_for():
    tx = optclip.clip_by_norm(thresholds.relative_to_params())
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="`params` must be .*Give.*params"):
        tx.update(jnp.ones(2), state)


def test_a_rule_of_gradients_in_a_tree_without_leaves():
    rule = thresholds.of_gradients(thresholds.moment())
    tx = optclip.clip_by(rule, over="leaf")
    assert tx.update({}, tx.init({}), gradients={})[0] == {}
