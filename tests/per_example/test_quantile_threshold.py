"""The threshold of Andrew et al.: its limit, its formula, its noise and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import ExampleInfo, QuantileThreshold

DISTRIBUTIONS = {
    "normal": lambda rng, size: np.abs(rng.normal(size=size)),
    "lognormal": lambda rng, size: np.exp(2 * rng.normal(size=size)),
    "uniform": lambda rng, size: rng.uniform(3, 5, size),
}


def info_of(norms, padding=None):
    norms = jnp.asarray(norms, jnp.float32)
    padding = jnp.zeros(norms.shape, bool) if padding is None else padding
    return ExampleInfo(None, norms, norms, norms > jnp.inf, jnp.asarray(padding))


@functools.partial(jax.jit, static_argnums=0)
def one_step(rule, norms, padding=None, key=None):
    return rule.update(rule.init(), info_of(norms, padding), key)


@pytest.mark.parametrize(("quantile", "noise"), [(0.2, 50.0), (0.5, 0.0), (0.9, 50.0)])
def test_quantile_threshold_converges_to_quantile_in_200_steps(quantile, noise):
    rng = np.random.default_rng(0)
    size = 1000
    rule = QuantileThreshold(quantile, count_noise=noise, expected_batch_size=size)
    norms = [draw(rng, (200, size)) for draw in DISTRIBUTIONS.values()]
    keys = jax.random.split(jax.random.key(1), 200)

    @jax.jit
    @jax.vmap
    def thresholds(norms):
        def step(state, seen):
            of_step, key = seen
            state = rule.update(state, info_of(of_step), key if noise else None)
            return state, state.threshold

        return jax.lax.scan(step, rule.init(), (norms, keys))[1]

    # A single noisy step changes the result by a percent.
    reached = np.median(thresholds(np.float32(norms))[:, -20:], 1)
    for limit, draw in zip(reached, DISTRIBUTIONS.values(), strict=True):
        assert abs((draw(rng, 100_000) <= limit).mean() - quantile) < 0.02


def test_quantile_threshold_step_equals_formula_without_padding():
    rule = QuantileThreshold(0.7, learning_rate=0.3, init_value=2.0)
    norms = np.array([1.0, 2.0, 3.0, np.nan, np.inf, 0.5])
    padding = np.array([False] * 5 + [True])
    state = one_step(rule, norms, padding)
    fraction = ((norms[:5] <= 2) - 0.5).sum() / 5 + 0.5
    np.testing.assert_allclose(state.fraction, fraction, rtol=1e-6)
    np.testing.assert_allclose(
        state.threshold, 2 * np.exp(-0.3 * (fraction - 0.7)), rtol=1e-6
    )
    none = one_step(rule, norms, np.ones(6, bool))
    np.testing.assert_allclose(none.threshold, 2.0, rtol=1e-6)


def moved(norms, threshold, quantile=0.5, limits=(1e-10, 1e10)):
    """Return the next threshold in float64."""
    fraction = ((norms <= threshold) - 0.5).sum() / len(norms) + 0.5
    return np.clip(threshold * np.exp(-0.2 * (fraction - quantile)), *limits)


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (0.0, {"min_value": 0.05, "max_value": 10}),
        (np.inf, {"min_value": 0.01, "max_value": 0.2}),
        (0.0, {}),
    ],
)
def test_quantile_threshold_stays_in_limits_and_returns(norm, options):
    """For batches without a gradient or without a finite one."""
    rule, expected = QuantileThreshold(**options), 0.1
    limits = rule.min_value, rule.max_value
    norms = np.full((300, 4), norm)
    norms[250:] = 1.0

    def step(state, of_step):
        state = rule.update(state, info_of(of_step))
        return state, state.threshold

    _, thresholds = jax.jit(lambda n: jax.lax.scan(step, rule.init(), n))(norms)
    for of_step, threshold in zip(norms, np.float64(thresholds), strict=True):
        expected = moved(of_step, expected, limits=limits)
        np.testing.assert_allclose(threshold, expected, rtol=1e-4)
    assert expected != limits[0]


@pytest.mark.parametrize(("old", "limit"), [(0.0, 1e-3), (np.inf, 1e3), (1e9, 1e3)])
def test_quantile_threshold_outside_limits_recovers(old, limit):
    rule = QuantileThreshold(min_value=1e-3, max_value=1e3)
    state = rule.init()._replace(threshold=jnp.float32(old))
    below = np.full(4, 1.0)
    state = rule.update(state, info_of(below))
    expected = moved(below, limit, limits=(1e-3, 1e3))
    np.testing.assert_allclose(state.threshold, expected, rtol=1e-6)


def test_quantile_threshold_divides_noisy_count_by_expected_size():
    """Zero and non-finite norms count: leaving them out would depend on the data."""
    rule = QuantileThreshold(count_noise=3.0, expected_batch_size=20, init_value=1.0)
    key = jax.random.key(7)
    norms = np.array([0.5, 0.6, 2.0, 0.0, 0.0, np.nan, np.inf])
    state = one_step(rule, norms, None, key)
    noise = 3 * float(jax.random.normal(key))
    np.testing.assert_allclose(state.fraction, (0.5 + noise) / 20 + 0.5, rtol=1e-5)


def test_quantile_threshold_of_float64_numbers_keeps_state():
    half = np.float64(0.5)
    rule = QuantileThreshold(half, learning_rate=half, init_value=half)
    with jax.enable_x64(True):
        state = jax.eval_shape(rule.init)
        assert jax.eval_shape(rule.update, state, ONES) == state
    from_numbers = rule.update(type(state)(0.5, 0.5), ONES)
    assert from_numbers.threshold > 0.5


@pytest.mark.parametrize("first", [1.0, {"a": 1.0, "b": 1.0, "c": 1.0}])
def test_noise_multiplier_splits_budget(first):
    rule = functools.partial(
        QuantileThreshold, init_value=first, expected_batch_size=200
    )
    count = len(first) if isinstance(first, dict) else 1
    for relation, moves in (
        ("add_or_remove", 0.5),
        ("zero_out", 1),
        ("replace_one", 1),
    ):
        found = rule(count_noise=10.0).noise_multiplier(1.1, relation)
        together = (found**-2 + count * (10.0 / moves) ** -2) ** -0.5
        assert together == pytest.approx(1.1, rel=1e-12)
    with pytest.raises(ValueError, match="`count_noise` must be above .* got 0.0"):
        rule().noise_multiplier(1.1)
    least = 0.5 * count**0.5
    with pytest.raises(ValueError, match=f"above {least} times the noise multiplier"):
        rule(count_noise=0.5).noise_multiplier(1.1)


def test_quantile_threshold_of_groups_counts_each_with_own_noise():
    first = {"a": 1.0, "b": 3.0}
    norms = {"a": np.array([0.5, 2.0, 2.0]), "b": np.array([np.nan, 2.0, 1.0])}
    info = info_of(norms["a"])._replace(norms=jax.tree.map(jnp.asarray, norms))
    rule = QuantileThreshold(
        init_value=first, count_noise=4.0, expected_batch_size=16, max_value=3.1
    )
    state = rule.update(rule.init(), info, jax.random.key(3))
    exact = QuantileThreshold(init_value=first)
    without = exact.update(exact.init(), info)
    noise = [
        (float(state.fraction[k]) - 0.5) * 16 - ((norms[k] <= first[k]) - 0.5).sum()
        for k in "ab"
    ]
    assert abs(noise[0] - noise[1]) > 0.1
    assert all(0 < abs(x) < 20 for x in noise)
    for k, old in first.items():
        expected = old * np.exp(-0.2 * (np.float64(state.fraction[k]) - 0.5))
        np.testing.assert_allclose(state.threshold[k], min(expected, 3.1), rtol=1e-6)
        np.testing.assert_allclose(
            without.threshold[k], moved(norms[k], old), rtol=1e-6
        )


ONES = info_of(np.ones(2))
NOISY = {"count_noise": 1.0, "expected_batch_size": 8}
GROUPED = {"init_value": {"a": 1.0, "b": 1.0}}
OVER_GROUPS = r"over groups, with the labels \['a', 'b'\]"
BY_LEAF = ONES._replace(norms={"w": np.ones(2)})


@pytest.mark.parametrize(
    ("options", "info", "key", "error", "words"),
    [
        ({}, np.ones(3), None, TypeError, "`info` must be an ExampleInfo"),
        ({}, BY_LEAF, None, TypeError, "one norm per example"),
        ({}, ONES, 0, ValueError, "`key` must be a PRNG key .*None without"),
        (NOISY, ONES, None, ValueError, "`key` must be a PRNG key with"),
        *(
            (GROUPED, ONES._replace(norms=norms), None, TypeError, OVER_GROUPS)
            for norms in (np.ones(2), {"a": np.ones(2)})
        ),
    ],
)
def test_quantile_threshold_bad_argument_raises(options, info, key, error, words):
    rule = QuantileThreshold(**options)
    with pytest.raises(error, match=words):
        rule.update(rule.init(), info, key)
