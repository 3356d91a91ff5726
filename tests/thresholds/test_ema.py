"""Averages of norms by hand: how they begin, and what the warm-up does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers
from tests.support.running_rules import INF, seen, updated


def test_slices_are_clipped_by_one_factor_in_the_warm_up():
    """In the warm-up all are clipped by one factor, whatever their shapes."""
    norms = {"a": np.array([[3.0], [0.0], [0.0]]), "b": np.array([[4.0]])}
    rule = thresholds.ema(warmup=1, max_norm=1.0)
    zeros = jax.tree.map(jnp.zeros_like, seen(norms).norm)
    limits, memory = updated(rule, norms, rule.init(zeros))
    np.testing.assert_allclose(limits["a"][0, 0], 0.6, rtol=1e-6)
    np.testing.assert_allclose(limits["b"], [[0.8]], rtol=1e-6)
    assert memory.step == 1
    # After it, each by its own average; what never had a gradient is not known.
    limits, _ = updated(rule, norms, memory, step=1)
    np.testing.assert_allclose(limits["b"], [[1.05 * 0.8]], rtol=1e-6)
    assert limits["a"][1, 0] == INF


@pytest.mark.parametrize("unit", [1.0, 2.0**-90, 2.0**90])
def test_the_warm_up_clips_at_any_size(unit):
    """Norms 3 and 4 together are 5; at the threshold nothing is clipped."""
    norms = {"a": 3.0 * unit, "b": 4.0 * unit}
    zeros = {"a": jnp.float32(0), "b": jnp.float32(0)}
    for most, wanted in ((1.0, [0.6, 0.8]), (5.0, [INF, INF]), (9.0, [INF, INF])):
        rule = thresholds.ema(warmup=1, max_norm=most * unit)
        limits, _ = updated(rule, norms, rule.init(zeros))
        found = np.array([limits["a"], limits["b"]], np.float64) / unit
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_zeros_divide_by_nothing():
    rule = thresholds.ema(warmup=1)
    with jax.debug_nans(True):
        limit, _ = rule.update(seen(0.0), rule.init(jnp.float32(0)))
    assert limit == INF


def test_the_ratio_may_be_a_schedule():
    rule = thresholds.ema(lambda step: 2.0 + step, 0.5, 0)
    memory = rule.init(jnp.float32(0))
    limit, memory = updated(rule, 3.0, memory, step=0)
    assert limit == INF
    limit, memory = updated(rule, 100.0, memory, step=1)
    np.testing.assert_allclose(limit, 3.0 * 3.0)
    np.testing.assert_allclose(memory.norm, 0.5 * 3.0 + 0.5 * 9.0)


@pytest.mark.parametrize("start", ["first", "debiased", "zero"])
def test_an_average_begins_as_asked(start):
    """Norms 4, 2, 6, unclipped: the least of a warm-up, their mean, or from zero."""
    rule = thresholds.ema(100.0, 0.5, 2, INF, start)
    memory, found = rule.init(jnp.float32(0)), []
    for step, norm in enumerate((4.0, 2.0, 6.0)):
        _, memory = updated(rule, norm, memory, step=step)
        found.append(float(memory.norm))
    debiased = [4.0, (2 * 2.0 + 4.0) / 3, (4 * 6.0 + 2 * 2.0 + 4.0) / 7]
    wanted = {"first": [4.0, 2.0, 4.0], "debiased": debiased, "zero": [2.0, 2.0, 4.0]}
    np.testing.assert_allclose(found, wanted[start], rtol=1e-6)


def test_a_leaf_of_zeros_in_the_warm_up_is_not_clipped():
    """Nor does it hide in the record what the others were clipped to."""
    tx = optclip.recipes.adagc()
    tree = {"frozen": jnp.zeros(2), "w": jnp.array([30.0, 40.0])}
    _, state = helpers.quick_jit(tx.update)(tree, tx.init(tree))
    numbers = optclip.metrics(state)
    assert numbers["clip/threshold"] == 1
    np.testing.assert_allclose(numbers["clip/coefficient"], 0.02, rtol=1e-6)


def test_an_average_that_would_stay_zero_is_refused():
    with pytest.raises(
        ValueError, match=r"`decay` must be below 1, got 1.*clip all to 0"
    ):
        thresholds.ema(decay=1.0, start="zero")
    with pytest.raises(
        ValueError, match=r"`decay` must be below 1, got 1.*clip all to 0"
    ):
        thresholds.moment(decay=1.0)
