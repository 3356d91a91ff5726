"""Quantiles, means and deviations of the last norms, by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from optclip.thresholds import _window
from tests.support import helpers
from tests.support.running_rules import INF, seen, updated

NORMS = [3.0, 1.0, 7.0, 2.0, 5.0, 4.0, 0.5]


def quantiles(q):
    rule = thresholds.quantile(q, 5)

    def step(memory, norm):
        return rule.update(seen(norm), memory)[::-1]

    return jax.lax.scan(step, rule.init(jnp.float32(0)), jnp.float32(NORMS))[1]


traced_quantiles = helpers.quick_jit(quantiles)


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_a_quantile_is_that_of_numpy_traced_or_not(q):
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
def test_each_slice_has_a_window_of_its_own(window):
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
    history = _window.empty(jnp.float32(0), 3)
    for n, norm in enumerate((1.0, 2.0, 3.0, 4.0)):
        history = _window.with_norms(history, jnp.float32(norm), 3)
        assert history.num_known == min(n + 1, 3)
        assert history.next == (n + 1) % 3
    np.testing.assert_array_equal(history.norms, [4.0, 2.0, 3.0])


def test_a_long_window_is_one_number_a_step():
    tx = optclip.clip_by_global_norm(thresholds.quantile(0.1, 10_000))
    state = tx.init({"a": jnp.ones((100, 100))})
    assert sum(x.nbytes for x in jax.tree.leaves(state)) < 64_000


def test_lengths_that_would_never_clip_are_refused():
    for numbers in (
        {"window": 1},
        {"window": 4, "warmup": 5},
        {"window": 4, "ddof": 4},
    ):
        with pytest.raises(
            ValueError, match="nothing would ever be clipped. Give a longer"
        ):
            thresholds.mean_plus_std(3.0, **numbers)


@pytest.mark.parametrize("rule", ["quantile", "mean_plus_std"])
def test_a_state_of_another_window_is_refused(rule):
    make = getattr(optclip.thresholds, rule)
    tx, longer = (optclip.clip_by_global_norm(make(window=n)) for n in (4, 8))
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="window=8.*`window` must be 4, .*got 8"):
        longer.update(jnp.ones(2), state)
