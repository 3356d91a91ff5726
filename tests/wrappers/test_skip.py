"""Test which steps `skip` skips, and that they leave the optimizer unchanged."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

import optclip
from optclip import thresholds
from tests.support import helpers, registry
from tests.support.running_rules import UserRule
from tests.support.steps import over_steps, unstacked

PARAMS = {"w": np.float32([1.0, 2.0]), "b": np.float32([3.0])}
SGD = optax.sgd(1.0)
INNER = optax.chain(optax.adamw(optax.linear_schedule(0.1, 0.0, 100)), optax.trace(0.9))
AROUND_ADAM = optclip.skip(INNER, max_norm=10.0)


def grads(size):
    return {"w": jnp.stack([0.6 * size, 0.0 * size]), "b": 0.8 * size[None]}


def run(tx, sizes, **extra):
    """Return the updates and the state of each step."""
    params = {key: np.stack([x] * len(sizes)) for key, x in PARAMS.items()}
    rows = jax.vmap(grads)(np.float32(sizes))
    extra = {key: np.float32(x) for key, x in extra.items()}
    return map(unstacked, over_steps(tx, rows, params, **extra))


def taken(updates):
    """Return whether each step was taken: 1 or 0."""
    return [int(np.any(tree["b"] != 0)) for tree in updates]


@pytest.mark.parametrize("bad", [100.0, np.nan, np.inf, -np.inf])
def test_skip_leaves_optimizer_bit_identical(bad):
    """Schedule and bias correction continue as if the step had not occurred."""
    updates, states = run(AROUND_ADAM, [1.0, 2.0, bad, 1.5])
    expected, _ = run(INNER, [1.0, 2.0, 1.5, 1.0])
    helpers.assert_identical(states[2].skip_inner, states[1].skip_inner)
    assert taken(updates) == [1, 1, 0, 1]
    chex.assert_trees_all_close(updates[3], expected[2])
    assert states[3].skip_inner[0][0].count == 3


def test_skip_metrics_count_skipped_steps():
    clip = optclip.clip_by_global_norm(1.0)
    tx = optclip.skip(optax.chain(clip, SGD), max_norm=10.0)
    _, states = run(tx, [2.0, 100.0, 50.0, np.nan, 0.5, 60.0])
    metrics = optclip.metrics(states[-1])
    expected = {
        "skip/skipped": 4, "skip/consecutive": 1, "skip/threshold": 10,
        "skip/norm": 60, "skip/rate": 4 / 6, "skip/nonfinite": 1,
        # The inner transformation ran in two steps.
        "clip/norm": 0.5, "clip/rate": 0.5,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert optclip.metrics(states[3])["skip/consecutive"] == 3


@pytest.mark.parametrize("over", ["tree", "leaf"])
def test_skip_records_leaves_of_skipped_gradient(over):
    """The transformation inside keeps the norms of the step before."""
    inner = optax.chain(optclip.clip_by_global_norm(1.0, record="leaves"), SGD)
    tx = optclip.skip(inner, max_norm=10.0, over=over, record="leaves")
    _, states = run(tx, [2.0, 100.0, np.nan])
    metrics = [optclip.metrics(state) for state in states]
    key = "skip/leaf_norm" if over == "tree" else "skip/norm"
    for size, step in zip([2.0, 100.0, np.nan], metrics, strict=True):
        for leaf, part in (("w", 0.6), ("b", 0.8)):
            np.testing.assert_allclose(step[f"{key}/{leaf}"], part * size, rtol=1e-6)
    assert metrics[1]["clip/norm"] == metrics[0]["clip/norm"] == 2
    np.testing.assert_allclose(metrics[2]["skip/rate"], 2 / 3, rtol=1e-6)
    assert "not finite in up to 1" in optclip.summary(states[2]) or over == "tree"


@pytest.mark.parametrize(
    ("limits", "sizes", "values", "expected"),
    [
        # After two skipped finite steps one is taken, whatever its norm.
        (
            {"max_norm": 10.0, "max_consecutive": 2},
            *([100.0] * 5 + [1.0] + [100.0] * 2, np.ones(8), [0, 0, 1, 0, 0, 1, 0, 0]),
        ),
        # A step that is not finite is never taken, and keeps the number of others.
        (
            {"max_norm": 10.0, "max_consecutive": 2, "max_loss": 5.0},
            [100.0, np.nan, 100.0, np.inf, 1.0, 1.0, 100.0, 1.0],
            [1.0, 1.0, 1.0, 1.0, np.nan, 9.0, 1.0, -np.inf],
            [0, 0, 0, 0, 0, 1, 0, 0],
        ),
        # A loss may be negative.
        ({"max_loss": -1.0}, np.ones(3), [-2.0, -0.5, -1.0], [1, 0, 1]),
        ({"max_loss": UserRule((), lambda *_: (2.0, ()))}, np.ones(2), [1, 3], [1, 0]),
        # Ten times the largest of the losses before, as in Megatron-LM.
        (
            {"max_loss": thresholds.scaled(thresholds.quantile(1.0, 100), 10.0)},
            *(np.ones(4), [2.0, 5000.0, 19.0, 2.0], [1, 0, 1, 1]),
        ),
    ],
)
def test_skip_by_numbers_takes_steps_below_them(limits, sizes, values, expected):
    updates, _ = run(optclip.skip(SGD, **limits), sizes, value=values)
    assert taken(updates) == expected


def number_skipped(tx, limited, sizes):
    """Return the number of skipped steps with these norms, or losses."""
    ones = np.ones(len(sizes))
    norms, losses = (sizes, ones) if limited == "max_norm" else (ones, sizes)
    _, states = run(tx, norms, value=losses)
    return optclip.metrics(states[-1])["skip/skipped"]


SHIFT = [1.0, 1.1, 0.9, 50.0, 50.0, 50.0, 50.0]


@pytest.mark.parametrize(("learns", "skipped"), [(True, 1), (False, 4)])
@pytest.mark.parametrize("limited", ["max_norm", "max_loss"])
def test_skip_after_lasting_change_ends_if_it_learns(limited, learns, skipped):
    rule = thresholds.mean_plus_std(3.0, window=4, warmup=3)
    tx = optclip.skip(SGD, **{limited: rule}, learn_skipped=learns)
    assert number_skipped(tx, limited, SHIFT) == skipped


FIXED = [10.0, lambda step: 10.0 + 0 * step]
RULES = [math.inf, thresholds.mean_plus_std(3.0, window=4, warmup=3)]


@pytest.mark.parametrize("max_norm", FIXED + RULES)
@pytest.mark.parametrize("max_loss", FIXED + RULES)
def test_skip_by_default_never_exceeds_fixed_limit_and_follows_rules(
    max_norm, max_loss
):
    """No step above a fixed limit is taken, and rules allow later ones."""
    norms = np.repeat([1.0, 100.0, 1.0, 100.0, 1.0], 120)
    losses = np.repeat([1.0, 1.0, 100.0, 100.0, 1.0], 120)
    noise = 1 + 0.01 * np.random.default_rng(0).normal(size=(2, len(norms)))
    tx = optclip.skip(SGD, max_norm=max_norm, max_loss=max_loss)
    updates, _ = run(tx, norms * noise[0], value=losses * noise[1])
    fractions = np.reshape(taken(updates), (5, 120)).mean(axis=1)
    is_above = np.zeros(5, bool)
    is_above[[1, 3]] |= max_norm in FIXED
    is_above[[2, 3]] |= max_loss in FIXED
    np.testing.assert_array_equal(fractions[is_above], 0)
    assert np.all(fractions[~is_above] >= 0.2)


WINDOW = thresholds.mean_plus_std(3.0, window=4, warmup=2)
LATE = thresholds.zscore(2.0, warmup=2)


@pytest.mark.parametrize(
    ("rule", "limited", "skipped"),
    [
        (WINDOW, "max_norm", 0),
        (WINDOW, "max_loss", 1),
        (LATE, "max_norm", 0),
        (LATE, "max_loss", 0),
    ],
)
def test_skip_learns_from_losses_of_zero_but_not_from_norms_of_zero(
    rule, limited, skipped
):
    """A loss of 0 is a loss. After four of them, a mean of zeros is the limit."""
    sizes = [1.0, 1.1, 0.0, 0.0, 0.0, 0.0, 1.05] if rule is WINDOW else [0, 0, 0, 1, 2]
    tx = optclip.skip(SGD, **{limited: rule})
    assert number_skipped(tx, limited, sizes) == skipped


@pytest.mark.parametrize(("scale", "name"), [(1.0, "value"), (-1.0, "loss")])
def test_skip_by_loss_skips_high_and_nonfinite_losses(scale, name):
    """A loss may be negative; nothing is skipped in the warm-up."""
    rule = thresholds.mean_plus_std(6.0, window=8, warmup=3, ddof=1)
    spike, bad = 3.0 + 10.0 * scale, (np.nan, np.inf, -np.inf)
    losses = np.array([3.0, 3.1, 2.9, 3.0, spike, 3.05, *bad, 3.0])
    tx = optclip.skip(SGD, max_loss=rule)
    updates, states = run(tx, np.ones(10), **{name: losses * scale})
    assert taken(updates) == [1, 1, 1, 1, 0, 1, 0, 0, 0, 1]
    assert optclip.metrics(states[0])["skip/loss_threshold"] == np.inf
    assert optclip.metrics(states[5])["skip/loss"] == np.float32(3.05 * scale)


def test_skip_by_schedule_follows_steps_and_skips_if_it_is_nan():
    tx = optclip.skip(
        SGD,
        max_norm=lambda step: jnp.where(step == 3, np.nan, 10.0),
        max_loss=lambda step: jnp.where(step == 4, np.nan, 10.0 * step),
    )
    updates, states = run(tx, np.ones(6), value=[1.0, 1.0, 21.0, 1.0, 1.0, 1.0])
    limits = [optclip.metrics(state)["skip/loss_threshold"] for state in states]
    np.testing.assert_array_equal(limits, [0, 10, 20, 30, np.nan, 50])
    assert taken(updates) == [0, 1, 0, 0, 0, 1]
    # The step of a NaN threshold is finite.
    tx = optclip.skip(SGD, max_norm=lambda _: np.nan, max_consecutive=1)
    updates, _ = run(tx, [1.0, np.nan, 1.0])
    assert taken(updates) == [0, 0, 1]


@pytest.mark.parametrize(
    ("limit", "extra", "words"),
    [
        (5.0, {}, r"`value` must be .*None.*value=loss\)"),
        (5.0, {"value": np.ones(2)}, "`value` must be .*got array"),
        (
            thresholds.relative_to_params(),
            {"value": 1.0},
            "`max_loss` must be .*got Relative.*Try",
        ),
        (np.ones(3), {"value": 1.0}, "`max_loss` must be one number per step"),
    ],
)
def test_skip_by_loss_rejects_other_values(limit, extra, words):
    tx = optclip.skip(SGD, max_loss=limit)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra))


@pytest.mark.parametrize(
    ("sizes", "is_taken"), [((1, 100), 1), ((100, 1), 0), ((1, np.nan), 0)]
)
def test_skip_by_groups_ignores_group_without_limit(sizes, is_taken):
    groups = optclip.groups({"w": "x", "b": "y"})
    tx = optclip.skip(SGD, max_norm={"x": 10.0, "y": None}, over=groups)
    tree = {"w": np.float32([sizes[0], 0.0]), "b": np.float32([sizes[1]])}
    updates, _ = helpers.quick_jit(tx.update)(tree, tx.init(PARAMS))
    assert taken([updates]) == [is_taken]


def test_skip_counters_stop_at_largest_number():
    last, state = np.int32(2**31 - 1), AROUND_ADAM.init(PARAMS)
    state = optax.tree.set(state, skip_skipped=last, skip_consecutive=last - 1)
    update = helpers.quick_jit(AROUND_ADAM.update)
    for _ in range(2):
        _, state = update(grads(np.float32(100)), state, PARAMS)
        metrics = optclip.metrics(state)
        assert metrics["skip/skipped"] == metrics["skip/consecutive"] == last


def test_skip_passes_zeros_to_optimizer():
    """So that a NaN raises nothing there, and no derivative is NaN."""
    clip = optclip.clip_by_global_norm(1.0, nonfinite="raise")
    tx = optclip.skip(optax.chain(clip, optax.scale_by_adam()), max_norm=10.0)

    def length(size):
        updates, _ = tx.update(grads(size), tx.init(PARAMS))
        return sum(jnp.sum(x) for x in jax.tree.leaves(updates))

    checked = checkify.checkify(jax.value_and_grad(length))
    error, (value, slope) = helpers.quick_jit(checked)(np.float32(np.nan))
    assert error.get() is None
    assert value == slope == 0


def test_skip_around_multi_steps_excludes_step_from_mean():
    steps = optax.MultiSteps(SGD, every_k_schedule=2)
    with pytest.raises(TypeError, match=r"Pass its .gradient_transformation\(\)"):
        optclip.skip(steps)
    tx = optclip.skip(steps.gradient_transformation())
    updates, _ = run(tx, [1.0, 1.0, np.nan, 1.0, 3.0])
    found = [float(tree["b"][0]) for tree in updates]
    np.testing.assert_allclose(found, [0, -0.8, 0, 0, -1.6], rtol=1e-6)


def test_skip_zeroes_all_numbers():
    """Whole numbers and sparse values too; PRNG keys and places are unchanged."""
    tx = optclip.skip(optax.identity(), max_norm=1.0)
    tree = {
        "h": jnp.ones(2, jnp.bfloat16),
        "n": np.array([5]),
        "m": BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [2]])), shape=(5,)),
        "key": jax.random.key(0),
        "number": 8.0,
        "none": None,
    }
    updates, state = helpers.quick_jit(tx.update)(tree, tx.init(tree), tree)
    assert state.skip_record["skip"].skip_skipped == 1
    assert updates["h"].dtype == jnp.bfloat16
    zeros = (*map(updates.get, ("h", "n", "number")), updates["m"].data)
    assert not any(map(np.any, zeros))
    np.testing.assert_array_equal(updates["m"].indices, tree["m"].indices)
    assert updates["key"] == tree["key"]


@pytest.mark.parametrize("name", registry.RULES)
def test_skip_by_rule_under_debug_nans_raises_nothing(name):
    """A rule without a norm so far has an infinite threshold, and computes no NaN."""
    rule = getattr(thresholds, name)()
    tx = optclip.skip(optax.identity(), max_norm=rule, over=registry.RULES[name])
    state = tx.init(jnp.ones(2))
    with jax.debug_nans(True):
        for updates in jnp.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]):
            _, state = tx.update(updates, state, updates)
