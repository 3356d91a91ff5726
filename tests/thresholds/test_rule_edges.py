"""Rules by themselves, handed norms and memories: where one number decides."""

import dataclasses
import functools
import math
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from optclip._arrays import _numerics
from optclip.thresholds import Seen, _running, _window, _zscore
from tests.support import helpers

INF = math.inf


def seen(norm, *, step=0, finite=True):
    norm = jax.tree.map(jnp.float32, norm)

    def keep(limits):
        return jax.tree.map(jnp.minimum, norm, limits)

    finite = jax.tree.map(lambda x: jnp.full(x.shape, finite), norm)
    return Seen(
        norm, finite, keep, lambda tree: tree, updates=None, params=None,
        step=jnp.int32(step), extra={},
    )  # fmt: skip


@functools.cache
def compiled(rule):
    def update(norm, finite, step, memory):
        return rule.update(seen(norm, finite=finite, step=step), memory)

    return helpers.quick_jit(update)


def updated(rule, norm, memory, *, step=0, finite=True):
    """The threshold and the new memory, of a program that all steps share."""
    norm = jax.tree.map(np.float32, norm)
    return compiled(rule)(norm, finite, np.int32(step), memory)


def weights(decay):
    """Of a plain average, and of one without bias after so many norms."""
    norm = jnp.float32(1.0)
    counts = [jnp.int32(n) for n in range(6)]
    debiased = [jnp.stack(_running.debiased_parts(decay, n, norm)) for n in counts]
    return jnp.stack(_running.parts(decay, norm)), jnp.stack(debiased)


traced_weights = helpers.quick_jit(weights)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_weights_of_an_average(decay, traced):
    known = helpers.quick_jit(lambda: weights(decay))
    plain, debiased = traced_weights(decay) if traced else known()
    np.testing.assert_allclose(plain, [decay, 1 - decay], rtol=1e-4 if traced else 1e-7)
    for n, found in enumerate(debiased):
        taken = 1 / (n + 1) if decay == 1 else (1 - decay) / (1 - decay ** (n + 1))
        rtol = 1e-4 if traced else 1e-6
        np.testing.assert_allclose(found, [1 - taken, taken], rtol=rtol, atol=1e-7)


def test_counts_stay_at_the_largest():
    largest = np.iinfo(np.int32).max
    for count, after in ((0, 1), (5, 6), (largest - 1, largest), (largest, largest)):
        assert _numerics.counted(jnp.int32(count)) == after


NORMS = [3.0, 1.0, 7.0, 2.0, 5.0, 4.0, 0.5]


def quantiles(q):
    rule = thresholds.quantile(q, 5)

    def step(memory, norm):
        return rule.update(seen(norm), memory)[::-1]

    return jax.lax.scan(step, rule.init(jnp.float32(0)), jnp.float32(NORMS))[1]


traced_quantiles = helpers.quick_jit(quantiles)


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_a_traced_quantile(q):
    exact = [np.quantile(NORMS[max(0, n - 4) : n + 1], q) for n in range(len(NORMS))]
    np.testing.assert_allclose(traced_quantiles(q), exact, rtol=1e-6)
    known = helpers.quick_jit(lambda: quantiles(q))
    np.testing.assert_allclose(known(), exact, rtol=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_a_quantile_of_a_first_norm_that_is_bad_knows_nothing(q):
    rule = thresholds.quantile(q, 3)
    limit, _ = updated(rule, 0.0, rule.init(jnp.float32(0)), finite=False)
    assert limit == INF


@pytest.mark.parametrize("window", [2, 5])
def test_windows_of_slices(window):
    """Each slice by itself, and the window is the first axis, not the last."""
    steps = np.random.default_rng(0).lognormal(size=(7, 3, 1))
    quantile = thresholds.quantile(0.3, window)
    band = thresholds.mean_plus_std(1.5, window, warmup=2, ddof=1)
    memories = [rule.init(jnp.zeros((3, 1))) for rule in (quantile, band)]
    for n, norms in enumerate(steps):
        low, memories[0] = updated(quantile, norms, memories[0])
        last = steps[max(0, n - window + 1) : n + 1]
        np.testing.assert_allclose(low, np.quantile(last, 0.3, axis=0), rtol=1e-5)
        high, memories[1] = updated(band, norms, memories[1])
        known = steps[max(0, n - window) : n]
        if n < 2:
            assert np.all(high == INF)
        else:
            wanted = known.mean(0) + 1.5 * known.std(0, ddof=1)
            np.testing.assert_allclose(high, wanted, rtol=1e-5)
    chex.assert_shape(memories[0].norms, (window, 3, 1))


@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_a_deviation_of_too_few_divides_by_nothing(ddof):
    rule = thresholds.mean_plus_std(1.0, 6, ddof=ddof)
    memory = rule.init(jnp.float32(0))
    # One operation after the other, each of which is looked at.
    with jax.debug_nans(True):
        for norm in (1.0, 2.0, 4.0):
            limit, memory = rule.update(seen(norm), memory)
            assert limit == INF
        limit, _ = rule.update(seen(9.0), memory)
    exact = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(limit, exact.mean() + exact.std(ddof=ddof), rtol=1e-6)


@pytest.mark.parametrize(("window", "needed"), [(2, 2), (4, 2), (6, 3), (9, 4)])
def test_half_a_window_is_its_warm_up(window, needed):
    rule = thresholds.mean_plus_std(0.0, window)
    memory = rule.init(jnp.float32(0))
    for n in range(needed):
        limit, memory = updated(rule, 1.0 + n, memory)
        assert limit == INF
    limit, _ = updated(rule, 99.0, memory)
    np.testing.assert_allclose(limit, (1 + needed) / 2)


def test_a_mean_of_one_norm_is_that_norm():
    rule = thresholds.mean_plus_std(5.0, 4, warmup=1)
    _, memory = updated(rule, 3.0, rule.init(jnp.float32(0)))
    np.testing.assert_allclose(updated(rule, 9.0, memory)[0], 3.0, rtol=1e-5)


def test_equal_norms_are_not_clipped_by_rounding():
    rule = thresholds.mean_plus_std(2.0, 4, warmup=2)
    memory = rule.init(jnp.float32(0))
    for _ in range(3):
        limit, memory = updated(rule, 3.0, memory)
    np.testing.assert_allclose(limit, 3.0 * (1 + 2e-6), rtol=1e-7)


def test_a_window_holds_its_last_norms_and_no_more():
    history = _window._empty(jnp.float32(0), 3)
    for n, norm in enumerate((1.0, 2.0, 3.0, 4.0)):
        history = _window._with(history, jnp.float32(norm), 3)
        assert history.num_known == min(n + 1, 3)
        assert history.next == (n + 1) % 3
    np.testing.assert_array_equal(history.norms, [4.0, 2.0, 3.0])


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
    assert updated(rule, 2.0, memory)[0] == INF
    limit, after = updated(rule, 2.5, memory)
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


def test_ema_by_slices_of_leaves_of_other_shapes():
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
def test_ema_in_its_warm_up_at_any_size(unit):
    """Norms 3 and 4 together are 5; at the threshold nothing is clipped."""
    norms = {"a": 3.0 * unit, "b": 4.0 * unit}
    zeros = {"a": jnp.float32(0), "b": jnp.float32(0)}
    for most, wanted in ((1.0, [0.6, 0.8]), (5.0, [INF, INF]), (9.0, [INF, INF])):
        rule = thresholds.ema(warmup=1, max_norm=most * unit)
        limits, _ = updated(rule, norms, rule.init(zeros))
        found = np.array([limits["a"], limits["b"]], np.float64) / unit
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_ema_of_zeros_divides_by_nothing():
    rule = thresholds.ema(warmup=1)
    with jax.debug_nans(True):
        limit, _ = rule.update(seen(0.0), rule.init(jnp.float32(0)))
    assert limit == INF


def test_ema_by_a_schedule_of_its_ratio():
    rule = thresholds.ema(lambda step: 2.0 + step, 0.5, 0)
    memory = rule.init(jnp.float32(0))
    limit, memory = updated(rule, 3.0, memory, step=0)
    assert limit == INF
    limit, memory = updated(rule, 100.0, memory, step=1)
    np.testing.assert_allclose(limit, 3.0 * 3.0)
    np.testing.assert_allclose(memory.norm, 0.5 * 3.0 + 0.5 * 9.0)


@pytest.mark.parametrize("start", ["first", "debiased", "zero"])
def test_how_an_average_begins(start):
    """Norms 4, 2, 6, unclipped: the least of a warm-up, their mean, or from zero."""
    rule = thresholds.ema(100.0, 0.5, 2, INF, start)
    memory, found = rule.init(jnp.float32(0)), []
    for step, norm in enumerate((4.0, 2.0, 6.0)):
        _, memory = updated(rule, norm, memory, step=step)
        found.append(float(memory.norm))
    debiased = [4.0, (2 * 2.0 + 4.0) / 3, (4 * 6.0 + 2 * 2.0 + 4.0) / 7]
    wanted = {"first": [4.0, 2.0, 4.0], "debiased": debiased, "zero": [2.0, 2.0, 4.0]}
    np.testing.assert_allclose(found, wanted[start], rtol=1e-6)


def test_a_mean_over_rms_of_zeros_and_of_others():
    rule = thresholds.mean_over_rms(eps=0.0)
    limit, memory = updated(rule, 0.0, rule.init(jnp.float32(0)))
    assert limit == 0.0
    limit, _ = updated(rule, 2.0, memory)
    mean, square = 2 * 0.3 / (1 - 0.49), 4 * 0.1 / (1 - 0.81)
    np.testing.assert_allclose(limit, mean / math.sqrt(square), rtol=1e-6)
    rule = thresholds.mean_over_rms(eps=2.0)
    limit, _ = updated(rule, 3.0, rule.init(jnp.float32(0)))
    np.testing.assert_allclose(limit, 3.0 / (3.0 + 2.0), rtol=1e-6)


def test_second_moments_by_hand():
    rule = thresholds.second_moment(4.0, 0.5, warmup=1)
    memory = rule.init(jnp.zeros(2))
    limit, memory = updated(rule, np.array([3.0, 0.0]), memory)
    assert np.all(limit == INF)
    # The root of half of 9, times the root of 4; a zero is not known.
    limit, memory = updated(rule, np.array([1.0, 5.0]), memory)
    np.testing.assert_allclose(limit, [2 * math.sqrt(4.5), INF], rtol=1e-6)
    square = [0.5 * 4.5 + 0.5, 0.5 * 25]
    np.testing.assert_allclose(memory.value, np.sqrt(square), rtol=1e-6)
    assert memory.steps == 2


def test_the_average_of_maxima_by_hand():
    rule = thresholds.ema_of_max(0.5)
    memory = rule.init(jnp.zeros(3))
    chex.assert_shape(memory.value, ())
    for norms, wanted in (([1.0, 4.0, 2.0], 4.0), ([1.0, 1.0, 1.0], 2.0)):
        limit, memory = updated(rule, np.array(norms), memory)
        np.testing.assert_allclose(limit, wanted, rtol=1e-6)


def test_the_maximum_of_nothing_is_zero():
    rule = thresholds.ema_of_max(0.5)
    limit, _ = updated(rule, np.zeros(0), rule.init(jnp.zeros(0)))
    assert limit == 0.0


def test_a_moment_of_power_zero_is_refused():
    with pytest.raises(ValueError, match=r"`power` must be .*got 0.0"):
        thresholds.moment(0.0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_moments_by_hand(power):
    rule = thresholds.moment(power, 0.75)
    memory = rule.init(jnp.zeros(2))
    exact = np.zeros(2)
    for norms in ([3.0, 0.0], [1.0, 0.0], [8.0, 2.0]):
        limit, memory = updated(rule, np.array(norms), memory)
        exact = 0.75 * exact + 0.25 * np.array(norms) ** power
        np.testing.assert_allclose(limit, exact ** (1 / power), rtol=1e-5)


def test_a_side_without_a_bound_is_not_clipped():
    values = jnp.array([-9.0, 9.0])
    for bounds, left in (
        (thresholds.bounds(upper=1.0), [-9.0, 1.0]),
        (thresholds.bounds(lower=-1.0), [-1.0, 9.0]),
    ):
        tx = optclip.clip_by(bounds, over="element")
        found, _ = helpers.quick_jit(tx.update)(values, tx.init(values))
        np.testing.assert_array_equal(found, left)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda n: thresholds.second_moment(warmup=n), 0),
        (lambda n: thresholds.ema(warmup=n), 0),
        (lambda n: thresholds.zscore(warmup=n), 1),
        (lambda n: thresholds.quantile(window=n), 1),
        (lambda n: thresholds.mean_plus_std(window=8, warmup=n), 1),
        (lambda n: thresholds.mean_plus_std(window=8, ddof=n), 0),
    ],
)
def test_the_least_length(make, least):
    make(least)
    with pytest.raises(ValueError, match=f"an int from {least} to"):
        make(least - 1)


def test_nothing_public_can_be_changed_by_accident():
    """A rule or scope that changes after `jit` has seen it would not be seen again."""
    modules = [m for name, m in sys.modules.items() if name.startswith("optclip")]
    found = {
        x for m in modules for x in vars(m).values() if dataclasses.is_dataclass(x)
    }
    classes = [x for x in found if isinstance(x, type)]
    assert len(classes) > 20
    assert not [x for x in classes if not x.__dataclass_params__.frozen]
