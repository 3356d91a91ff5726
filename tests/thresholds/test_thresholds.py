"""Test what a rule is given, may return and has recorded, and rules without averages."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import _thresholds, thresholds
from tests.support import covering, helpers, registry
from tests.support.running_rules import DIRECTION, INF, UserRule
from tests.support.steps import history, over_steps


def watching(log):
    """Build a rule that logs its arguments."""

    def update(seen, memory):
        log.append(seen)
        return 1.0, {"seen": memory["seen"] + 1}

    return UserRule({"seen": jnp.zeros((), jnp.int32)}, update)


def test_rule_receives_norm_step_parameters_and_extra_arguments():
    log = []
    tx = optclip.clip_by_global_norm(watching(log))
    grads, params = np.float32([3.0, 4.0]), np.float32([6.0, 8.0])
    state = tx.init(params)

    @helpers.quick_jit
    def given(state):
        tx.update(grads, state, params, value=jnp.float32(7.0))
        seen = log[-1]
        kept = [seen.keep(jnp.float32(limit)) for limit in (2.0, 9.0)]
        return seen._replace(keep=kept, measure=seen.measure(params))

    seen = given(state)
    assert (seen.norm, seen.finite, seen.step) == (5.0, True, 0)
    assert (seen.keep, seen.measure) == ([2.0, 5.0], 10.0)
    np.testing.assert_array_equal(seen.params, params)
    assert seen.extra == {"value": 7.0}


def test_rule_in_tree_receives_its_subtree():
    log = []
    a, one, two = np.float32([3.0, 4.0]), np.float32([1.0]), np.float32([2.0])
    tree = {"a": a, "b": [one, two]}
    tx = optclip.clip_by_norm({"a": None, "b": watching(log)})

    @helpers.quick_jit
    def given(tree):
        clipped, _ = tx.update(tree, tx.init(tree), tree)
        seen = log[-1]
        return clipped, seen.norm, seen.measure(tree), seen.keep(1.5)

    clipped, norm, measured, kept = given(tree)
    assert norm == measured == [1.0, 2.0]
    assert (kept, clipped["b"]) == ([1.0, 1.5], [1.0, 1.0])
    helpers.assert_identical(clipped["a"], tree["a"])


def test_rule_that_measures_missing_parameters_raises_with_call():
    rule = UserRule((), lambda seen, memory: (seen.measure(seen.params), memory))
    tx = optclip.clip_by_global_norm(rule)
    with pytest.raises(ValueError, match=r"`params` must be .*tx.update\(updates, st"):
        tx.update(TREE, tx.init(TREE))


def test_rule_may_return_a_threshold_per_norm_and_a_whole_number():
    halves = UserRule(
        (), lambda seen, memory: ({"a": seen.norm["a"] / 2, "b": jnp.int32(5)}, memory)
    )
    tree = {"a": np.float32([3.0, 4.0]), "b": np.float32([10.0])}
    clipped = helpers.quickly_clipped(optclip.clip_by_norm(halves), tree)
    chex.assert_trees_all_close(clipped, jax.tree.map(lambda x: x / 2, tree))


WIDENING = UserRule(
    jnp.zeros((), jnp.bfloat16), lambda seen, m: (1.0, m.astype(jnp.float32) + 1)
)


@pytest.mark.parametrize(
    ("rule", "over"),
    [
        (thresholds.ema(), "leaf"),
        (thresholds.zscore(), "leaf"),
        (thresholds.mean_over_rms(), "leaf"),
        (thresholds.mean_plus_std(), "leaf"),
        (thresholds.quantile(), optclip.axes(0)),
        (_thresholds.second_moment(), "element"),
        (WIDENING, "leaf"),
    ],
)
def test_rule_memory_keeps_its_dtype(rule, over):
    """Beside updates of float64, and if a user's rule widens it."""
    tx = optclip.clip_by(rule, over=over)
    with jax.enable_x64(True):
        state = jax.eval_shape(tx.init, np.ones(2, np.float32))
        _, new = jax.eval_shape(tx.update, np.ones(2, np.float64), state)
    assert new.clip_memory == state.clip_memory


def test_rule_may_remember_prng_key():
    tx = optclip.clip_by_norm(
        UserRule(jax.random.key(0), lambda _, key: (1.0, jax.random.fold_in(key, 1)))
    )
    x = np.full(2, 9, np.float32)
    _, state = helpers.quick_jit(tx.update)(x, tx.init(x))
    assert jax.tree.leaves(state.clip_memory) == [
        jax.random.fold_in(jax.random.key(0), 1)
    ]


def test_rule_with_number_as_memory_is_traced_once():
    rule = UserRule(0.0, lambda seen, memory: (memory + 1, memory + seen.norm))
    tx = optclip.clip_by_global_norm(rule)
    state = jax.eval_shape(tx.init, jnp.ones(2))
    assert jax.eval_shape(tx.update, jnp.ones(2), state)[1] == state


@pytest.mark.parametrize(
    ("over", "policy", "expected"),
    [
        ("tree", "propagate", [np.nan, np.nan]),
        ("tree", "zero", [0.0, 0.0]),
        ("element", "propagate", [np.nan, 1.0]),
        ("element", "zero", [0.0, 1.0]),
    ],
)
def test_rule_in_warm_up_applies_nonfinite_policy(over, policy, expected):
    """The policy applies at the rule's inf; a user's inf changes nothing."""
    updates = np.float32([np.nan, 1.0])
    for limit, left in ((thresholds.mean_plus_std(3.0, 8), expected), (INF, updates)):
        tx = optclip.clip_by(limit, over=over, nonfinite=policy)
        np.testing.assert_array_equal(helpers.quickly_clipped(tx, updates), left)


def test_rule_in_warm_up_zeroes_finite_gradient_of_infinite_norm():
    tx = optclip.clip_by_global_norm(thresholds.zscore(), nonfinite="zero")
    updates, metrics, state = history(tx, np.full((1, 4), 3e38, np.float32))
    np.testing.assert_array_equal(updates, np.zeros((1, 4)))
    assert metrics["clip/nonfinite"] == 1
    assert not np.any(helpers.memories(state)[0][0].mean)


@pytest.mark.parametrize("over", ["tree", "leaf"])
def test_previous_norm_scales_by_previous_step(over):
    """The first by its own norm; a zero and a NaN are not the norm before."""
    norms = np.array([5.0, 20.0, 0.1, 0.0, 3.0, 1e10, 7.0, np.nan, 0.2, 0.5])
    judged = np.array([5.0, 5.0, 20.0, 0.1, 3.0, 3.0, 1e10, 7.0, 7.0, 0.2])
    tx = optclip.clip_by(thresholds.previous_norm(2.0), over=over, nonfinite="zero")
    updates = np.float32(norms[:, None] * DIRECTION)
    clipped, _ = over_steps(tx, updates)
    factors = np.nan_to_num(norms) * np.minimum(1.0, 2.0 / judged)
    np.testing.assert_allclose(clipped, factors[:, None] * DIRECTION, rtol=2e-6)
    np.testing.assert_array_equal(clipped[-1], updates[-1])


def test_previous_norm_limit_zero_keeps_zero_gradient():
    tx, zeros = optclip.clip_by_global_norm(thresholds.previous_norm(0.0)), jnp.zeros(2)
    np.testing.assert_array_equal(tx.update(zeros, tx.init(zeros))[0], zeros)


# A recorded threshold is what the rule returned, in steps that are not finite too.

TREE = {"a": np.float32([1, 2, 3]), "b": np.float32([[0.5, 0.1], [2, 1]])}
BAD = TREE | {"a": np.float32([math.nan, -math.inf, 1])}
STEPS = [jax.tree.map(lambda x: x * math.nan, TREE), BAD, TREE]
STEPS += [jax.tree.map(np.zeros_like, TREE), BAD]
ADD = optax.identity()
GROUPS = optclip.groups(optclip.by_path({"a": "x", "b": "y"}.get))
SETUPS = [
    (optclip.clip_by, {"over": "tree"}),
    (optclip.clip_by, {"over": "leaf", "record": "leaves"}),
    (optclip.clip_by, {"over": GROUPS}),
    (optclip.clip_by, {"over": optclip.units(), "nonfinite": "zero"}),
    (optclip.clip_by, {"over": "element"}),
    (functools.partial(optclip.skip, optax.sgd(1.0)), {"over": "tree"}),
    (functools.partial(optclip.skip, optax.sgd(1.0)), {"over": "leaf"}),
    (lambda max_norm: optclip.constrain(ADD, optclip.clip_by(max_norm)), {}),
    (lambda max_norm: optclip.with_history(optclip.clip_by(max_norm)), {}),
]


def values(tree):
    return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("at", range(len(registry.RULES)), ids=registry.RULES)
def test_recorded_threshold_is_what_the_rule_returned(at, monkeypatch):
    """A third of the setups for each rule in turn, all with `--full`."""
    name = [*registry.RULES][at]
    rule = getattr(optclip.thresholds, name)()
    update, returned = type(rule).update, []

    def kept(self, seen, memory):
        limit, new = update(self, seen, memory)
        returned[:] = values(limit)
        return limit, new

    monkeypatch.setattr(type(rule), "update", kept)
    setups = SETUPS if covering.full else SETUPS[at % 3 :: 3]
    for make, options in SETUPS[4:5] if name in registry.OF_ELEMENTS else setups:
        argument = "max_norm" if make is not optclip.clip_by else "threshold"
        tx = make(**{argument: rule}, **options)
        state = tx.init(TREE)
        for step in STEPS:
            _, state = tx.update(step, state, TREE)
            recorded = np.array(
                [x for key, x in optclip.metrics(state).items() if "/threshold" in key]
            )
            near = np.isclose(recorded[:, None], returned, rtol=1e-6)
            assert near.any(axis=1).all(), (options, recorded, returned)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_recorded_threshold_of_loss_in_warm_up_is_infinite(loss):
    tx = optclip.skip(optax.sgd(1.0), max_loss=optclip.thresholds.mean_plus_std(6.0))
    _, state = tx.update(TREE, tx.init(TREE), value=jnp.float32(loss))
    metrics = optclip.metrics(state)
    assert (metrics["skip/loss_threshold"], metrics["skip/skipped"]) == (math.inf, 1)


def test_recorded_threshold_of_narrow_rule_is_infinite():
    """A rule of the user may return a dtype in which the largest number is smaller."""

    class Narrow:
        def init(self, norm):
            return ()

        def update(self, seen, memory):
            return jnp.bfloat16(math.inf), memory

    tx = optclip.clip_by_global_norm(Narrow(), nonfinite="zero")
    out, state = tx.update(BAD, tx.init(TREE))
    assert optclip.metrics(state)["clip/threshold"] == math.inf
    assert not np.any(values(out))
