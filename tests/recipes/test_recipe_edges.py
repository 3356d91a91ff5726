"""Recipes by hand: one step whose threshold depends on each number that they fix."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes
from tests.support import helpers


def history(tx, norms, params=None, **extra):
    """The updates and metrics of each step, the gradient one number."""
    update = helpers.quick_jit(lambda g, s: tx.update(g, s, params, **extra))
    state, found = tx.init(jnp.zeros(1) if params is None else params), []
    for norm in norms:
        updates, state = update(jnp.array([norm]), state)
        found.append((float(updates[0]), optclip.metrics(state)))
    return found


def test_olmo_skip_from_half_a_window_on():
    """Of 9 with the current one: from three norms before it, 1, 3 and 2."""
    tx = recipes.olmo_skip(optax.sgd(1.0), 2.0, 9, use_value=False)
    found = history(tx, [1.0, 3.0, 2.0, 4.1, 2.0])
    limits = [float(metrics["skip/threshold"]) for _, metrics in found]
    assert limits[:3] == [np.inf] * 3
    # Their mean is 2, their deviation 1, by n - 1.
    np.testing.assert_allclose(limits[3], 4.0, rtol=1e-6)
    assert [updates for updates, _ in found] == [-1.0, -3.0, -2.0, 0.0, -2.0]
    # The skipped one is learned from.
    learned = np.array([1.0, 3.0, 2.0, 4.1])
    wanted = learned.mean() + 2 * learned.std(ddof=1)
    np.testing.assert_allclose(limits[4], wanted, rtol=1e-6)


@pytest.mark.parametrize("window", [2, 3])
def test_olmo_skip_of_so_few_knows_from_two_on(window):
    tx = recipes.olmo_skip(optax.sgd(1.0), 2.0, window, use_value=False)
    found = history(tx, [1.0, 3.0, 5.0])
    limits = [float(metrics["skip/threshold"]) for _, metrics in found]
    np.testing.assert_allclose(limits, [np.inf, np.inf, 2 + 2 * 2**0.5], rtol=1e-6)
    assert found[2][0] == 0.0


def test_olmo_skip_by_the_loss_too():
    tx = recipes.olmo_skip(optax.sgd(1.0), 2.0, 4)
    state, update = tx.init(jnp.zeros(1)), helpers.quick_jit(tx.update)
    for value, taken in ((1.0, True), (2.0, True), (9.0, False)):
        updates, state = update(jnp.ones(1), state, value=value)
        assert bool(updates[0] != 0) == taken
    limit = optclip.metrics(state)["skip/value_threshold"]
    np.testing.assert_allclose(limit, 1.5 + 2 * np.sqrt(0.5), rtol=1e-6)


@pytest.mark.parametrize(("told", "steps"), [({}, 2), ({"learn_skipped": True}, 3)])
def test_axlearn_skip_does_not_count_what_it_skips(told, steps):
    """By a decay of 1, the plain mean of so many steps: 3 is its second or its third."""
    tx = recipes.axlearn_skip(optax.sgd(1.0), decay=1.0, **told)
    found = history(tx, [1.0, 101.0, 3.0, 1.0])
    limits = [float(metrics["skip/threshold"]) for _, metrics in found]
    last = 20 * (1 + 2 / steps)
    np.testing.assert_allclose(limits, [np.inf, 20.0, 20.0, last], rtol=1e-6)
    assert [updates for updates, _ in found] == [-1.0, 0.0, -3.0, -1.0]


@pytest.mark.parametrize("recipe", ["olmo_skip", "axlearn_skip", "megatron_skip"])
def test_skips_are_around_adam_if_around_nothing(recipe):
    make = getattr(recipes, recipe)
    adam = history(make(), [3.0], value=1.0)
    np.testing.assert_allclose(adam[0][0], 1.0, rtol=1e-4)
    given = history(make(optax.sgd(2.0)), [3.0], value=1.0)
    assert given[0][0] == -6.0


def test_uclip_clips_at_one():
    tx = recipes.uclip()
    updates, state = tx.update(jnp.array([2.5]), tx.init(jnp.zeros(1)))
    assert (updates[0], state.feedback_residual[0]) == (1.0, 1.5)
    half = recipes.uclip(optclip.clip_by_value(0.5))
    updates, _ = half.update(jnp.array([2.5]), half.init(jnp.zeros(1)))
    assert updates[0] == 0.5


def test_clippy_by_hand():
    """A step of at most a half of |w| plus 0.1: here 0.6, 1.1 and 0.1; 3 times less."""
    tx = recipes.clippy(0.5, 0.1)
    update = helpers.quick_jit(tx.update)
    params = {"w": jnp.array([1.0, -2.0, 0.0]), "n": jnp.arange(2)}
    updates = {"w": jnp.array([1.2, 1.1, 0.3]), "n": jnp.arange(2)}
    found, state = update(updates, tx.init(params), params)
    np.testing.assert_allclose(found["w"], updates["w"] / 3, rtol=1e-6)
    np.testing.assert_array_equal(found["n"], updates["n"])
    # The norm of the step, and the one that it may have.
    found = optclip.metrics(state)
    np.testing.assert_allclose(found["clip/norm"], 1.2, rtol=1e-6)
    np.testing.assert_allclose(found["clip/threshold"], 0.4, rtol=1e-6)
    inside = {"w": updates["w"] / 4, "n": updates["n"]}
    found, _ = update(inside, tx.init(params), params)
    np.testing.assert_array_equal(found["w"], inside["w"])
    with pytest.raises(ValueError, match="`params` must be the parameters"):
        tx.update(updates, tx.init(params))


def test_clippy_where_nothing_may_move():
    """A step of 0 there is no step too far; any other makes all of the leaf still."""
    tx = recipes.clippy(1.0, 0.0)
    update = helpers.quick_jit(tx.update)
    params = jnp.array([0.0, 1.0])
    for updates, wanted in (([0.0, 0.5], [0.0, 0.5]), ([1.0, 0.5], [0.0, 0.0])):
        found, _ = update(jnp.array(updates), tx.init(params), params)
        np.testing.assert_allclose(found, wanted, atol=1e-30)


def test_olmo_ratio_by_hand():
    """Twice the average, from the second step on; eps is 1e-6 and can be given."""
    for options, eps in (({}, 1e-6), ({"eps": 0.0}, 0.0)):
        tx = recipes.olmo_ratio(2.0, 0.5, **options)
        found = history(tx, [1e-5, 8e-5])
        assert found[0][0] == jnp.float32(1e-5)
        np.testing.assert_allclose(found[1][0], 8e-5 * 2e-5 / (8e-5 + eps), rtol=1e-5)


def test_spam_without_grace_clips_from_the_second_step_on():
    tx = recipes.spam(optax.identity(), theta=4.0, b2=0.0, grace=0)
    found = history(tx, [1.0, 100.0])
    np.testing.assert_allclose([updates for updates, _ in found], [1.0, 2.0], rtol=1e-6)
    patient = recipes.spam(optax.identity(), theta=4.0, b2=0.0, grace=2)
    found = history(patient, [1.0, 100.0])
    np.testing.assert_allclose([updates for updates, _ in found], [1.0, 100.0])


# What the docstring of agc gives for attention kernels, and for embeddings.
OUTPUTS = lambda path, shape: 0 if len(shape) == 3 else None  # noqa: E731
WORDS = lambda path, shape: -1 if "embed" in path else None  # noqa: E731
SHAPES = {"embed": (6, 4), "attention": (5, 2, 3), "conv": (2, 2, 3, 4), "bias": (4,)}


def one_agc_step(tx, shapes, seed=0):
    rng = np.random.default_rng(seed)
    params, grads = (
        {key: jnp.asarray(rng.normal(size=s), jnp.float32) for key, s in shapes.items()}
        for _ in range(2)
    )
    return tx.update(grads, tx.init(params), params)[0], params


def ratios(updates, params, axis):
    """Of norms over these axes, in float64."""
    norms = [
        np.sqrt(np.sum(np.square(np.asarray(x, np.float64)), axis))
        for x in (updates, params)
    ]
    return norms[0] / norms[1]


@pytest.mark.parametrize(
    ("axis", "leaf", "over"),
    [
        (None, "attention", (0, 1)),
        (OUTPUTS, "attention", 0),
        (None, "embed", 0),
        (WORDS, "embed", -1),
    ],
)
def test_agc_takes_norms_over_the_axes_that_it_says(axis, leaf, over):
    found, params = one_agc_step(recipes.agc(0.01, axis=axis), SHAPES)
    np.testing.assert_allclose(ratios(found[leaf], params[leaf], over), 0.01, rtol=1e-5)


def test_agc_is_that_of_optax_but_for_attention_and_for_one_long_axis():
    theirs = optax.adaptive_grad_clip(0.01)
    expected, _ = one_agc_step(theirs, SHAPES)
    found, _ = one_agc_step(recipes.agc(0.01, axis=OUTPUTS), SHAPES)
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, rtol=1e-5, err_msg=key)
    plain, _ = one_agc_step(recipes.agc(0.01), SHAPES)
    differ = {k for k, x in plain.items() if not np.allclose(x, expected[k], rtol=1e-3)}
    assert differ == {"attention"}
    row = {"row": (1, 64)}
    expected, params = one_agc_step(theirs, row)
    np.testing.assert_allclose(
        ratios(expected["row"], params["row"], None), 0.01, rtol=1e-5
    )
    found, _ = one_agc_step(recipes.agc(0.01), row)
    np.testing.assert_allclose(np.abs(found["row"] / params["row"]).max(), 0.01, 1e-5)


def test_zclip_leaves_no_norm_above_its_ceiling_however_usual():
    """Norms near 3 are clipped to 1 in every step, and are its mean without a ceiling."""
    norms = [3.0, 3.1] * 20
    ceiling, none = (
        history(recipes.zclip(max_norm=top), norms) for top in (1.0, float("inf"))
    )
    np.testing.assert_allclose([update for update, _ in ceiling], 1.0, rtol=1e-6)
    assert ceiling[-1][1]["clip/rate"] == 1
    assert [update for update, _ in none] == [np.float32(norm) for norm in norms]
