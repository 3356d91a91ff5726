"""Test running averages, quantiles and deviations by hand and against their papers."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import _thresholds, thresholds
from tests.support import helpers, rules
from tests.support.running_rules import (
    INF,
    gradient,
    limits_of,
    seen,
    thresholds_of,
    updated,
)
from tests.support.steps import history, over_steps

NORMS = np.array([4.0, 1.0, 2.0, 6.0, 3.0, 5.0])
ADDING_EPS = thresholds.zscore(1.0, 0.5, 4, "mean", eps=1.0)
MODES = ["reciprocal", "mean", "percentile"]


def means_of_max(decay):
    return limits_of(_thresholds.ema_of_max(decay), NORMS)


traced_means = helpers.quick_jit(means_of_max)


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_unbiased_average_known_or_traced_is_weighted_mean(decay):
    """With a decay of 1 it is the plain mean."""
    expected = [
        np.average(NORMS[:n], weights=np.float64(decay) ** np.arange(n)[::-1])
        for n in range(1, len(NORMS) + 1)
    ]
    known = helpers.quick_jit(lambda: means_of_max(decay))()
    np.testing.assert_allclose(known, expected, rtol=1e-6)
    np.testing.assert_allclose(traced_means(decay), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "norms", "expected"),
    [
        # The mean of one norm over its root mean square is 1; zeros give 0.
        (thresholds.mean_over_rms(eps=0.0), [0.0, 0.0], [0.0, 0.0]),
        (thresholds.mean_over_rms(eps=2.0), [3.0], [0.6]),
        # Equal norms have a margin for rounding.
        (
            thresholds.mean_plus_std(2.0, 4, warmup=2),
            *([5.0] * 4, [INF, INF, 5.0 * (1 + 2e-6), 5.0 * (1 + 2e-6)]),
        ),
        # One norm deviates by nothing.
        (
            thresholds.mean_plus_std(5.0, 4, warmup=1),
            [3.0, 1.0],
            [INF, 3.0 * (1 + 5e-6)],
        ),
        # With an eps of 1 the norm minus 2, over 1 + 1, is above 1 from 4 on.
        (ADDING_EPS, [1.0, 3.0, 1.0, 3.0, 3.9], [INF] * 5),
        (ADDING_EPS, [1.0, 3.0, 1.0, 3.0, 4.1], [INF] * 4 + [2.0]),
    ],
)
def test_threshold_equals_hand_computed_value(rule, norms, expected):
    limits = helpers.quick_jit(lambda: limits_of(rule, norms))()
    np.testing.assert_allclose(limits, expected, rtol=5e-7)


def test_average_of_equal_norms_is_that_norm():
    """Separately rounded weights would let it drift, which would count as clipping."""
    rtols = {
        _thresholds.ema_of_max(): 2e-7,
        thresholds.ema(1.0, decay=0.9999, warmup=0): 1e-6,
        thresholds.moment(2.0, decay=0.9): 1e-6,
    }
    for rule, rtol in rtols.items():
        tx = optclip.clip_by(rule, over="leaf")
        for norm in (0.1, 3.3, 7.7):
            _, metrics, _ = history(tx, np.full((20_000, 1), norm, np.float32))
            np.testing.assert_allclose(metrics["clip/threshold"][-1], norm, rtol=rtol)
            assert metrics["clip/rate"][-1] in (0, 1), (rule, norm)


def test_second_moment_clips_elements_after_warm_up():
    """To the root of 4 times half of 9. An element that was always 0 is unclipped."""
    tx = optclip.clip_by_value(_thresholds.second_moment(4.0, 0.5, warmup=1))
    updates, _ = over_steps(tx, np.float32([[3.0, 0.0], [10.0, 5.0]]))
    expected = [[3.0, 0.0], [2 * math.sqrt(4.5), 5.0]]
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_second_moment_warms_up_each_leaf_from_its_first_finite_step():
    rule = _thresholds.second_moment(1.0, 0.5, warmup=2)
    tx = optclip.clip_by_value(rule, nonfinite="zero")
    sizes = np.full((6, 1), 3, np.float32)
    late = np.where(np.arange(6)[:, None] < 3, np.nan, sizes)
    updates, _ = over_steps(tx, {"a": sizes, "b": late})
    first = [3, 3, math.sqrt(9 * 0.75)]
    np.testing.assert_allclose(updates["a"][:3, 0], first, rtol=1e-6)
    np.testing.assert_allclose(updates["b"][:, 0], [0, 0, 0, *first], rtol=1e-6)


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
    limits, _ = updated(rule, np.array([3.0, 4.0]) * unit, rule.init(jnp.zeros(2)))
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


def test_ema_warm_up_records_threshold_next_to_zero_leaf():
    updates = {"frozen": np.zeros((1, 2), np.float32), "w": np.float32([[30, 40]])}
    _, metrics, _ = history(optclip.recipes.adagc(), updates)
    np.testing.assert_allclose(metrics["clip/threshold"], 1.0)
    np.testing.assert_allclose(metrics["clip/coefficient"], 0.02, rtol=1e-6)


def moments(rule, mean, deviation):
    """Return a memory after the warm-up of 4 steps."""
    numbers = jnp.float32(mean), jnp.float32(deviation), jnp.int32(4)
    return type(rule.init(jnp.float32(0)))(*numbers)


@pytest.mark.parametrize("mode", MODES)
def test_zscore_after_equal_norms_does_not_clip(mode):
    """Each operation is checked: nothing is divided by a deviation of 0."""
    rule = thresholds.zscore(2.0, 0.5, 4, mode, eps=0.0)
    with jax.debug_nans(True):
        limit, after = rule.update(seen(2.5), moments(rule, 2.0, 0.0))
    assert limit == INF
    learned = [after.mean, after.deviation]
    np.testing.assert_allclose(learned, [2.25, 0.25 * 0.5**0.5], rtol=1e-6)


LAST_NORMS = np.float32([3.0, 1.0, 7.0, 2.0, 5.0, 4.0, 0.5])


def quantiles(q):
    return [limits_of(thresholds.quantile(q, window), LAST_NORMS) for window in (1, 5)]


traced_quantiles = helpers.quick_jit(quantiles)


@pytest.mark.parametrize("q", [0.0, 0.77, 1.0])
def test_quantile_known_or_traced_equals_numpy(q):
    for limits in (helpers.quick_jit(lambda: quantiles(q))(), traced_quantiles(q)):
        for window, found in zip((1, 5), limits, strict=True):
            ends = range(1, len(LAST_NORMS) + 1)
            expected = [
                np.quantile(LAST_NORMS[max(0, n - window) : n], q) for n in ends
            ]
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("known", [0, 4, 8])
def test_quantile_value_and_derivative_equal_those_of_sort(q, known):
    """Windows of 9 have ties, zeros, negative losses, extreme and missing norms."""
    rng = np.random.default_rng(known)
    wide = 10 ** rng.uniform(-18, 38.2, (200, 9)) * rng.choice([1, -1, 0], (200, 9))
    rows = np.concatenate([wide, rng.choice([-1.0, 0.0, 2.0, 3e38], (200, 9))])
    rows = np.float32(rows)
    counts = jnp.full(400, known)
    rule = thresholds.quantile(q, 9)

    @helpers.quick_jit
    def value_and_derivative(rows):
        limits, pull = jax.vjp(limits_after, rows)
        return limits, pull(jnp.ones(400))[0]

    def limits_after(rows):
        memory = rule.init(rows[:, 0])
        memory = memory._replace(norms=rows, next=counts, num_known=counts)
        return rule.update(seen(rows[:, known]), memory)[0]

    limits, derivative = value_and_derivative(rows)
    place = np.argsort(rows[:, : known + 1], kind="stable")[:, int(q * known)]
    np.testing.assert_array_equal(limits, rows[np.arange(400), place])
    np.testing.assert_array_equal(derivative, np.eye(9)[place])


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_quantile_after_nonfinite_first_norm_is_inf(q):
    rule = thresholds.quantile(q, 3)
    limit, _ = updated(rule, 0.0, rule.init(jnp.float32(0)), finite=False)
    assert limit == INF


def test_mean_plus_std_of_too_few_norms_computes_no_nan():
    """Each operation is checked: the deviation of two norms less two divides by 0."""
    rule = thresholds.mean_plus_std(1.0, 6, ddof=2)
    memory = rule.init(jnp.float32(0))
    with jax.debug_nans(True):
        for norm in (1.0, 2.0, 4.0):
            limit, memory = rule.update(seen(norm), memory)
            assert limit == INF
        limit, _ = rule.update(seen(9.0), memory)
    norms = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(limit, norms.mean() + norms.std(ddof=2), rtol=1e-6)


# Each learned rule against its paper in float64, and what all have in common.

CASES = {
    "quantile": (thresholds.quantile(0.3, 1000), rules.AutoClip(0.3, 1000)),
    "quantile, ring": (thresholds.quantile(0.9, 40), rules.AutoClip(0.9, 40)),
    "mean_plus_std": (thresholds.mean_plus_std(1.0, 33), rules.Levanter(1.0, 33)),
    "zscore": (thresholds.zscore(1.5, 0.97, 25), rules.ZClip(1.5, 0.97, 25)),
    "zscore, capped": (
        thresholds.zscore(2.5, 0.9, 25, max_norm=3.0),
        rules.ZClip(2.5, 0.9, 25, max_norm=3.0),
    ),
    "zscore, mean": (
        thresholds.zscore(1.5, 0.9, 25, "mean"),
        rules.ZClip(1.5, 0.9, 25, "mean"),
    ),
    "zscore, percentile": (
        thresholds.zscore(1.0, 0.9, 25, "percentile", skip_spikes=True),
        rules.ZClip(1.0, 0.9, 25, "percentile", skip_spikes=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_learned_threshold_follows_its_paper(case):
    # An oracle remembers norms, so each run of the test needs a new one.
    rule, oracle = copy.deepcopy(CASES[case])
    limits, clipped, _ = thresholds_of(optclip.clip_by_global_norm(rule), rules.NORMS)
    expected = np.array([oracle.step(n) for n in rules.NORMS])
    # 0.9 and 0.1 in float32 add up to 2e-8 less than 1. In what zscore remembers the
    # deviations add up to 0.6e-5, and capped to 1.1e-5.
    rtol = {"zscore": 2e-5, "zscore, capped": 3e-5}.get(case, 1e-5)
    np.testing.assert_allclose(limits, expected, rtol=rtol)
    assert 0.1 <= np.mean(clipped) <= 0.9
    assert clipped[150]


@pytest.mark.parametrize(("warmup", "max_norm"), [(0, INF), (25, 2.0)])
def test_adagc_follows_its_paper(warmup, max_norm):
    sizes = [rules.NORMS, rules.NORMS[::-1] / 7, np.sin(np.arange(240)) ** 2]
    norms = np.stack(sizes, axis=1)
    oracle = rules.AdaGC(1.05, 0.9, warmup, max_norm)
    tx = optclip.recipes.adagc(1.05, 0.9, warmup, max_norm, record="leaves")
    columns = [np.stack([gradient(n) for n in column]) for column in norms.T]
    _, metrics, _ = history(tx, columns)
    limits = np.stack([metrics[f"clip/threshold/{i}"] for i in range(3)], axis=1)
    expected = np.stack([oracle.step(row) for row in norms])
    # The largest deviation measured on any CPU is 0.7e-5.
    np.testing.assert_allclose(limits, expected, rtol=2e-5)
    assert 0.1 <= np.mean(norms > expected) <= 0.9


RULES = {
    "quantile": thresholds.quantile(0.5, 4),
    "mean_plus_std": thresholds.mean_plus_std(1.0, 4, 2),
    "zscore": thresholds.zscore(1.5, 0.9, 2),
    "ema": thresholds.ema(1.5, 0.5, 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_learned_threshold_scales_with_huge_and_tiny_norms(rule):
    # Those that have a size of their own are made without it.
    free = {
        "zscore": thresholds.zscore(1.5, 0.9, 2, eps=0.0),
        "ema": thresholds.ema(1.5, 0.5, 0, INF),
    }
    tx = optclip.clip_by_global_norm(free.get(rule) or RULES[rule])
    norms = np.array([1.0, 2.0, 1.5, 1.2, 30.0, 1.1, 0.7])
    limits, clipped, _ = thresholds_of(tx, norms)
    assert np.any(clipped)
    for scale in (2.0**100, 2.0**-40):
        scaled, _, _ = thresholds_of(tx, norms * scale)
        np.testing.assert_allclose(scaled, limits * scale, rtol=1e-5)
