"""Test running averages of norms and of single elements by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers
from tests.support.running_rules import INF, limits_of, scanned, seen, updated

NORMS = np.array([4.0, 0.0, 2.0, 6.0, 3.0, 5.0])
MODES = ["reciprocal", "mean", "percentile"]


def means_of_max(decay):
    return limits_of(thresholds.ema_of_max(decay), NORMS)


traced_means = helpers.quick_jit(means_of_max)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_unbiased_average_known_or_traced_is_weighted_mean(decay):
    """With a decay of 1 it is the plain mean."""
    expected = [
        np.average(NORMS[:n], weights=np.float64(decay) ** np.arange(n)[::-1])
        for n in range(1, len(NORMS) + 1)
    ]
    known = helpers.quick_jit(lambda: means_of_max(decay))()
    np.testing.assert_allclose(known, expected, rtol=1e-6)
    np.testing.assert_allclose(traced_means(decay), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("decay", [0.75, 0.999])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_moment_is_power_mean(power, decay):
    limits = helpers.quick_jit(
        lambda: limits_of(thresholds.moment(power, decay), [0.0, *NORMS])
    )()
    mean, expected = 0.0, []
    for norm in (0.0, *NORMS):
        mean = decay * mean + (1 - decay) * norm**power
        expected.append(mean ** (1 / power))
    np.testing.assert_allclose(limits, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("eps", "norms", "expected"), [(0.0, [0.0, 0.0], [0.0, 0.0]), (2.0, [3.0], [0.6])]
)
def test_mean_over_rms_adds_eps_to_root(eps, norms, expected):
    """The mean of one norm over its root mean square is 1; zeros give 0."""
    limits = limits_of(thresholds.mean_over_rms(eps=eps), norms)
    np.testing.assert_allclose(limits, expected, rtol=1e-6)


def test_average_of_equal_norms_is_that_norm():
    """Weights rounded separately would let it drift, which reads as clipping."""
    rtols = {
        thresholds.ema_of_max(): 2e-7,
        thresholds.ema(1.0, decay=0.9999, warmup=0): 1e-6,
        thresholds.moment(2.0, decay=0.9): 1e-6,
    }
    for rule, rtol in rtols.items():
        tx = optclip.clip_by(rule, over="leaf")
        for norm in (0.1, 3.3, 7.7):
            _, metrics, _ = scanned(tx)(np.full((20_000, 1), norm, np.float32))
            last = metrics["clip/threshold"][-1]
            np.testing.assert_allclose(last, norm, rtol=rtol)
            assert metrics["clip/rate"][-1] in (0, 1), (rule, norm)


def test_second_moment_clips_elements_after_warm_up():
    """To the root of 4 times half of 9. An element that was always 0 is unclipped."""
    tx = optclip.clip_by_value(thresholds.second_moment(4.0, 0.5, warmup=1))
    updates, _, state = scanned(tx)(np.float32([[3.0, 0.0], [10.0, 5.0]]))
    expected = [[3.0, 0.0], [2 * math.sqrt(4.5), 5.0]]
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    # The spike is learned from as it was clipped: half of 4.5 and half of 18.
    memory = state.clip_memory[0][0]
    roots = np.sqrt([0.5 * 4.5 + 0.5 * 18.0, 0.5 * 25.0])
    np.testing.assert_allclose(jax.tree.leaves(memory.value)[0], roots, rtol=1e-6)


def test_ema_of_max_of_empty_leaf_is_zero():
    rule = thresholds.ema_of_max(0.5)
    limit, _ = updated(rule, np.zeros(0), rule.init(jnp.zeros(0)))
    assert limit == 0.0


def test_moment_derivative_is_finite_at_zero():
    tx = optclip.clip_by_value(thresholds.moment(2.0))
    state = tx.init(jnp.zeros(2))
    slopes = helpers.quick_jit(jax.jacrev(lambda u: tx.update(u, state)[0]))
    assert np.all(np.isfinite(slopes(np.zeros(2, np.float32))))


@pytest.mark.parametrize("unit", [1.0, 2.0**-90, 2.0**90])
@pytest.mark.parametrize(
    ("max_norm", "expected"), [(1.0, [0.6, 0.8]), (5.0, [INF, INF]), (9.0, [INF, INF])]
)
def test_ema_warm_up_clips_at_any_size(max_norm, expected, unit):
    """Norms of 3 and 4 are 5 together; at the threshold nothing is clipped."""
    rule = thresholds.ema(warmup=1, max_norm=max_norm * unit)
    norms = np.array([3.0, 4.0])
    limits, _ = updated(rule, norms * unit, rule.init(jnp.zeros(2)))
    np.testing.assert_allclose(np.float64(limits) / unit, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("first", [4.0, 2.0, 4.0]),
        ("debiased", [4.0, 8 / 3, 32 / 7]),
        ("zero", [2.0, 2.0, 4.0]),
    ],
)
def test_ema_start_option_sets_first_averages(start, expected):
    """Norms of 4, 2 and 6, unclipped, the first two in the warm-up."""
    rule = thresholds.ema(100.0, 0.5, 2, INF, start)
    memory, averages = rule.init(jnp.float32(0)), []
    for step, norm in enumerate((4.0, 2.0, 6.0)):
        _, memory = updated(rule, norm, memory, step=step)
        averages.append(memory.norm)
    np.testing.assert_allclose(averages, expected, rtol=1e-6)


def test_ema_ratio_may_be_a_schedule():
    rule = thresholds.ema(lambda step: 2.0 + step, 0.5, 0)
    limit, memory = updated(rule, 3.0, rule.init(jnp.float32(0)), step=0)
    assert limit == INF
    limit, memory = updated(rule, 100.0, memory, step=1)
    np.testing.assert_allclose([limit, memory.norm], [9.0, 6.0])


def test_ema_warm_up_records_threshold_beside_leaf_of_zeros():
    updates = {"frozen": np.zeros((1, 2), np.float32), "w": np.float32([[30, 40]])}
    _, metrics, _ = scanned(optclip.recipes.adagc())(updates)
    np.testing.assert_allclose(metrics["clip/threshold"], 1.0)
    np.testing.assert_allclose(metrics["clip/coefficient"], 0.02, rtol=1e-6)


@pytest.mark.parametrize("make", [thresholds.moment, thresholds.ema])
def test_average_that_would_stay_zero_is_rejected(make):
    options = {"start": "zero"} if make is thresholds.ema else {}
    words = r"`decay` must be below 1, got 1.*clip all to 0"
    with pytest.raises(ValueError, match=words):
        make(decay=1.0, **options)


def moments(rule, mean, deviation):
    """Return a memory after the warm-up of 4 steps."""
    numbers = jnp.float32(mean), jnp.float32(deviation), jnp.int32(4)
    return type(rule.init(jnp.float32(0)))(*numbers)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("reciprocal", 2 + 4 / 3), ("mean", 2.0), ("percentile", 4.0)],
)
def test_zscore_clips_norm_above_its_edge(mode, expected):
    """The mean is 2, the deviation 1 and z 2: the edge is 4."""
    rule = thresholds.zscore(2.0, 0.5, 4, mode, eps=0.0, skip_spikes=True)
    memory = moments(rule, 2.0, 1.0)
    limit, after = updated(rule, 4.0, memory)
    assert limit == INF
    # The mean moves half the way, and so does the variance.
    np.testing.assert_allclose([after.mean, after.deviation], [3.0, 1.0], rtol=1e-6)
    limit, after = updated(rule, 5.0, memory)
    np.testing.assert_allclose(limit, expected, rtol=1e-6)
    assert (after.mean, after.deviation, after.step) == (2.0, 1.0, 4)


@pytest.mark.parametrize("mode", MODES)
def test_zscore_after_equal_norms_does_not_clip(mode):
    """Each operation is checked: a deviation of 0 is no divisor."""
    rule = thresholds.zscore(2.0, 0.5, 4, mode, eps=0.0)
    with jax.debug_nans(True):
        limit, after = rule.update(seen(2.5), moments(rule, 2.0, 0.0))
    assert limit == INF
    learned = [after.mean, after.deviation]
    np.testing.assert_allclose(learned, [2.25, 0.25 * 0.5**0.5], rtol=1e-6)


def test_zscore_adds_eps_to_deviation():
    """(norm - 2) / (1 + 1) is above 1 from 4 on."""
    rule = thresholds.zscore(1.0, 0.5, 4, "mean", eps=1.0)
    memory = moments(rule, 2.0, 1.0)
    assert updated(rule, 3.9, memory)[0] == INF
    assert updated(rule, 4.1, memory)[0] == 2.0


@pytest.mark.parametrize("mode", MODES)
def test_zscore_learns_late_after_zeros_in_warm_up(mode):
    """Otherwise a leaf that gets gradients late would be clipped to zero."""
    rng = np.random.default_rng(0)
    norms = np.concatenate([np.zeros(30), 1 + 0.1 * rng.normal(size=50)])
    tx = optclip.clip_by_norm(thresholds.zscore(mode=mode))
    updates, _, _ = scanned(tx)(norms[:, None].astype(np.float32))
    assert np.mean(updates) > 0.9 * np.mean(norms)
