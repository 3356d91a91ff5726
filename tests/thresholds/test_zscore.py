"""Z-scores by hand: what is a spike, what is not known, what a leaf of zeros learns."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from optclip.thresholds import _zscore
from tests.support.running_rules import INF, scanned, seen, updated


@pytest.mark.parametrize("mode", ["reciprocal", "mean", "percentile"])
def test_a_spike_is_above_its_edge_not_at_it(mode):
    """Mean 2, deviation 1, z 2: the edge is 4; reciprocal clips 5 to 2 + 2 * 2 / 3."""
    rule = thresholds.zscore(2.0, 0.5, 4, mode, eps=0.0, skip_spikes=True)
    memory = _zscore.Moments(jnp.float32(2), jnp.float32(1), jnp.int32(4))
    limit, after = updated(rule, 4.0, memory)
    assert limit == INF
    # What is no spike is learned from: the mean moves half the way.
    assert after.mean == 3.0
    np.testing.assert_allclose(after.deviation, math.sqrt(0.5 + 0.5), rtol=1e-6)
    limit, after = updated(rule, 5.0, memory)
    wanted = {"reciprocal": 2 + 4 / 3, "mean": 2.0, "percentile": 4.0}[mode]
    np.testing.assert_allclose(limit, wanted, rtol=1e-6)
    assert (after.mean, after.deviation, after.step) == (2.0, 1.0, 4)


@pytest.mark.parametrize("mode", ["reciprocal", "mean", "percentile"])
def test_of_equal_norms_nothing_is_known(mode):
    rule = thresholds.zscore(2.0, 0.5, 4, mode, eps=0.0)
    memory = _zscore.Moments(jnp.float32(2), jnp.float32(0), jnp.int32(4))
    # One operation after the other, each of which is looked at.
    with jax.debug_nans(True):
        assert rule.update(seen(2.0), memory)[0] == INF
        limit, after = rule.update(seen(2.5), memory)
    assert limit == INF
    # It learned what was left.
    np.testing.assert_allclose(after.mean, 2.25, rtol=1e-6)
    np.testing.assert_allclose(after.deviation, 0.25 * 0.5**0.5, rtol=1e-6)


def test_eps_is_added_to_the_deviation():
    rule = thresholds.zscore(1.0, 0.5, 1, "mean", eps=1.0)
    memory = _zscore.Moments(jnp.float32(2), jnp.float32(1), jnp.int32(1))
    # (norm - 2) / (1 + 1) is above 1 from 4 on.
    assert updated(rule, 3.9, memory)[0] == INF
    assert updated(rule, 4.1, memory)[0] == 2.0


@pytest.mark.parametrize("mode", ["reciprocal", "mean", "percentile"])
def test_a_leaf_without_gradients_in_the_warm_up_learns_afterwards(mode):
    """It was clipped to zero for ever: zeros are no norms to hold it to."""
    tx = optclip.clip_by_norm(thresholds.zscore(mode=mode))
    rng = np.random.default_rng(0)
    norms = np.concatenate([np.zeros(30), 1 + 0.1 * rng.normal(size=50)])
    found, _, _ = scanned(tx)(norms[:, None].astype(np.float32))
    assert np.mean(found) > 0.9 * np.mean(norms)
