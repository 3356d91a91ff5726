"""Test quantiles, means and deviations of the last norms by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers
from tests.support.running_rules import INF, limits_of, seen, thresholds_of, updated

NORMS = np.float32([3.0, 1.0, 7.0, 2.0, 5.0, 4.0, 0.5])
mean_plus_std = thresholds.mean_plus_std


def limits_in_clip(rule, norms=NORMS):
    return thresholds_of(optclip.clip_by_global_norm(rule), norms)[0]


def quantiles(q):
    return [limits_of(thresholds.quantile(q, window), NORMS) for window in (1, 5)]


traced_quantiles = helpers.quick_jit(quantiles)


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_quantile_known_or_traced_equals_numpy(q):
    known = helpers.quick_jit(lambda: quantiles(q))()
    for limits in (known, traced_quantiles(q)):
        for window, found in zip((1, 5), limits, strict=True):
            ends = range(1, len(NORMS) + 1)
            expected = [np.quantile(NORMS[max(0, n - window) : n], q) for n in ends]
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_quantile_after_nonfinite_first_norm_is_inf(q):
    rule = thresholds.quantile(q, 3)
    limit, _ = updated(rule, 0.0, rule.init(jnp.float32(0)), finite=False)
    assert limit == INF


def test_mean_plus_std_of_too_few_norms_divides_by_nothing():
    """Each operation is checked: the deviation of two norms less two divides by 0."""
    rule = mean_plus_std(1.0, 6, ddof=2)
    memory = rule.init(jnp.float32(0))
    with jax.debug_nans(True):
        for norm in (1.0, 2.0, 4.0):
            limit, memory = rule.update(seen(norm), memory)
            assert limit == INF
        limit, _ = rule.update(seen(9.0), memory)
    norms = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(limit, norms.mean() + norms.std(ddof=2), rtol=1e-6)


@pytest.mark.parametrize(("window", "warmup"), [(2, 2), (4, 2), (6, 3), (9, 4)])
def test_mean_plus_std_warms_up_for_half_a_window(window, warmup):
    limits = limits_in_clip(mean_plus_std(0.0, window))[: warmup + 1]
    expected = [INF] * warmup + [np.mean(NORMS[:warmup])]
    np.testing.assert_allclose(limits, expected, rtol=1e-5)


def test_mean_plus_std_of_one_norm_is_that_norm():
    limits = limits_in_clip(mean_plus_std(5.0, 4, warmup=1))
    np.testing.assert_allclose(limits[:2], [INF, 3.0], rtol=1e-5)


def test_mean_plus_std_of_equal_norms_is_above_rounding():
    limits = limits_in_clip(mean_plus_std(2.0, 4, warmup=2), np.full(4, 5.0))
    np.testing.assert_allclose(limits[2:], 5.0 * (1 + 2e-6), rtol=1e-7)


@pytest.mark.parametrize(
    "numbers", [{"window": 1}, {"window": 4, "warmup": 5}, {"window": 4, "ddof": 4}]
)
def test_mean_plus_std_rejects_lengths_that_would_never_clip(numbers):
    words = "nothing would ever be clipped. Give a longer"
    with pytest.raises(ValueError, match=words):
        mean_plus_std(3.0, **numbers)


@pytest.mark.parametrize("make", [thresholds.quantile, mean_plus_std])
def test_window_rejects_state_of_another_length(make):
    tx, longer = (optclip.clip_by_global_norm(make(window=n)) for n in (4, 8))
    state = tx.init(NORMS)
    with pytest.raises(ValueError, match="window=8.*`window` must be 4, .*got 8"):
        jax.eval_shape(longer.update, NORMS, state)
