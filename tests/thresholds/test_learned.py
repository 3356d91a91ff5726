"""Test each learned rule against its paper in float64, and what all have in common."""

import copy

import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import covering, rules
from tests.support.running_rules import INF, gradient, thresholds_of
from tests.support.steps import history, over_steps

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
    tx = optclip.clip_by_global_norm(rule)
    limits, clipped, _ = thresholds_of(tx, rules.NORMS)
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


# One oracle per norm, except AdaGC, which takes all norms.
ORACLES = {
    "quantile": lambda: rules.AutoClip(0.5, 4),
    "mean_plus_std": lambda: rules.Levanter(1.0, 4),
    "zscore": lambda: rules.ZClip(1.5, 0.9, 2),
}


@pytest.mark.parametrize(
    "rule", list(RULES) if covering.full else ["quantile", "zscore"]
)
def test_each_slice_and_each_leaf_learns_alone(rule):
    """Each of six slices in two leaves, or of as many leaves, follows its paper."""
    rng = np.random.default_rng(0)
    shapes = (30, 3, 2), (30, 3, 4)
    steps = [rng.lognormal(size=shape).astype(np.float32) for shape in shapes]
    tx = optclip.clip_by(RULES[rule], over=optclip.axes(0))
    slices, _ = over_steps(tx, steps)
    tx = optclip.clip_by(RULES[rule], over="leaf", record="leaves")
    leaves, metrics, _ = history(tx, [*np.moveaxis(np.dstack(steps), 2, 0)])
    wide = np.float64(np.dstack(steps))
    norms = np.linalg.norm(wide, axis=1)
    if rule == "ema":
        limits = [*map(rules.AdaGC(1.5, 0.5, 1, 1.0).step, norms)]
    else:
        limits = np.transpose([[*map(ORACLES[rule]().step, row)] for row in norms.T])
    factors = np.minimum(1, limits / norms)
    assert np.all(np.min(factors, axis=0) < 1)
    for clipped in (np.dstack(slices), np.stack(leaves, axis=2)):
        np.testing.assert_allclose(clipped, wide * factors[:, None], rtol=1e-5)
    recorded = np.stack([metrics[f"clip/threshold/{i}"] for i in range(6)], axis=1)
    np.testing.assert_allclose(recorded, limits, rtol=1e-5)


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
