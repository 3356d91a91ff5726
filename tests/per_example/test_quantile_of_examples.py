"""The threshold of Andrew et al.: where it goes, what it costs, what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import ExampleInfo, QuantileThreshold, clipped_sum

DISTRIBUTIONS = {
    "normal": lambda rng, size: np.abs(rng.normal(size=size)),
    "lognormal": lambda rng, size: np.exp(2 * rng.normal(size=size)),
    "uniform": lambda rng, size: rng.uniform(3, 5, size),
}


def info_of(norms, padding=None):
    norms = jnp.asarray(norms, jnp.float32)
    padding = jnp.zeros(norms.shape, bool) if padding is None else padding
    return ExampleInfo(None, norms, norms, norms > jnp.inf, jnp.asarray(padding))


@pytest.mark.parametrize("noise", [0.0, 50.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_it_comes_to_its_quantile_in_200_steps(name, quantile, noise):
    rng = np.random.default_rng(0)
    draw = functools.partial(DISTRIBUTIONS[name], rng)
    size = 1000
    rule = QuantileThreshold(quantile, count_noise=noise, expected_batch_size=size)
    norms = jnp.asarray(draw((200, size)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 200)

    def step(state, seen):
        own, key = seen
        state = rule.update(state, info_of(own), key if noise else None)
        return state, state.threshold

    _, thresholds = jax.lax.scan(step, rule.init(), (norms, keys))
    # One noisy step more or less is a percent.
    reached = np.median(np.asarray(thresholds)[-20:])
    assert abs((draw(100_000) <= reached).mean() - quantile) < 0.02


def test_one_step_is_as_the_paper_says():
    rule = QuantileThreshold(0.7, learning_rate=0.3, init_value=2.0)
    norms = np.array([1.0, 2.0, 3.0, np.nan, np.inf, 0.5])
    padding = np.array([False] * 5 + [True])
    state = rule.update(rule.init(), info_of(norms, padding))
    fraction = ((norms[:5] <= 2) - 0.5).sum() / 5 + 0.5
    np.testing.assert_allclose(state.fraction, fraction, rtol=1e-6)
    np.testing.assert_allclose(
        state.threshold, 2 * np.exp(-0.3 * (fraction - 0.7)), rtol=1e-6
    )


def test_the_expected_size_and_noise_are_as_the_paper_says():
    rule = QuantileThreshold(count_noise=3.0, expected_batch_size=20, init_value=1.0)
    key = jax.random.key(7)
    state = rule.update(rule.init(), info_of(np.array([0.5, 0.6, 2.0])), key)
    noise = 3 * float(jax.random.normal(key))
    np.testing.assert_allclose(state.fraction, (0.5 + noise) / 20 + 0.5, rtol=1e-5)


def test_without_an_example_it_stays():
    rule = QuantileThreshold(0.9, init_value=3.0)
    state = rule.update(rule.init(), info_of(np.ones(2), np.ones(2, bool)))
    np.testing.assert_allclose(state.threshold, 3.0, rtol=1e-6)


def test_the_budget_is_split_as_the_paper_says():
    rule = QuantileThreshold(count_noise=10.0, expected_batch_size=200)
    found = rule.noise_multiplier(1.1)
    # What both of them together are worth is what was asked for.
    assert (found**-2 + (2 * 10.0) ** -2) ** -0.5 == pytest.approx(1.1, rel=1e-12)
    replaced = rule.noise_multiplier(1.1, "replace_one")
    assert (replaced**-2 + 10.0**-2) ** -0.5 == pytest.approx(1.1, rel=1e-12)
    with pytest.raises(ValueError, match="`count_noise` must be above .* got 0.0"):
        QuantileThreshold().noise_multiplier(1.1)
    few = QuantileThreshold(count_noise=0.5, expected_batch_size=200)
    with pytest.raises(ValueError, match="above 0.5 times the noise multiplier, 0.55"):
        few.noise_multiplier(1.1)


def test_it_clips_by_what_it_found():
    rule = QuantileThreshold(0.5, init_value=10.0)
    grads = jnp.arange(1.0, 10.0)[:, None]

    @jax.jit
    def step(state):
        found, info = clipped_sum(grads, state.threshold, strict=False)
        return rule.update(state, info), found

    state = rule.init()
    for _ in range(100):
        state, found = step(state)
    # A median moves at most this much around what it looks for.
    assert 4.5 < state.threshold < 5.6
    np.testing.assert_allclose(found, 10 + 5 * state.threshold, rtol=0.05)


def test_what_it_cannot_use_is_refused():
    rule = QuantileThreshold()
    with pytest.raises(TypeError, match="`info` must be what a clip with over='tree'"):
        rule.update(rule.init(), jnp.ones(3))
    by_leaf = info_of(np.ones(2))._replace(norms={"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="one norm an example"):
        rule.update(rule.init(), by_leaf)
    with pytest.raises(ValueError, match="`key` must be a PRNG key .*None without"):
        rule.update(rule.init(), info_of(np.ones(2)), jax.random.key(0))
    noisy = QuantileThreshold(count_noise=1.0, expected_batch_size=8)
    with pytest.raises(ValueError, match="`key` must be a PRNG key of this step"):
        noisy.update(noisy.init(), info_of(np.ones(2)))
    with pytest.raises(ValueError, match="expected_batch_size.*The actual number is"):
        QuantileThreshold(count_noise=1.0)
