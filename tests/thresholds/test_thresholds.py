"""Constants, schedules, and what a rule is shown."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from optclip.thresholds._rule import is_rule
from tests.support import helpers
from tests.support.running_rules import (
    INF,
)


@dataclasses.dataclass(frozen=True)
class Watcher:
    """A rule that writes down all it is shown."""

    log: list[Any] = dataclasses.field(default_factory=list, compare=False)

    def init(self, norm):
        self.log.append(norm)
        return {"seen": jnp.zeros((), jnp.int32)}

    def update(self, seen, memory):
        self.log.append(seen)
        return 1.0, {"seen": memory["seen"] + 1}


def test_a_rule_sees_norms_step_parameters_and_what_else_update_got():
    rule = Watcher()
    tx = optclip.clip_by_global_norm(rule)
    grads, params = jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])
    state = tx.init(params)
    (shape,) = rule.log
    assert shape.shape == ()

    @helpers.quick_jit
    def shown(state):
        tx.update(grads, state, params, value=jnp.float32(7.0))
        seen = rule.log[-1]
        kept = [seen.keep(jnp.float32(limit)) for limit in (2.0, 9.0)]
        return seen._replace(keep=kept, measure=seen.measure(params))

    seen = shown(state)
    assert (seen.norm, seen.finite, seen.step) == (5.0, True, 0)
    assert seen.keep == [2.0, 5.0]
    assert seen.measure == 10.0
    np.testing.assert_array_equal(seen.params, params)
    assert seen.extra == {"value": 7.0}


def test_a_rule_in_a_tree_sees_its_own_part():
    rule = Watcher()
    tree = {"a": jnp.array([3.0, 4.0]), "b": [jnp.array([1.0]), jnp.array([2.0])]}
    tx = optclip.clip_by_norm({"a": None, "b": rule})

    @helpers.quick_jit
    def shown(tree):
        found, _ = tx.update(tree, tx.init(tree), tree)
        seen = rule.log[-1]
        return found, seen.norm, seen.measure(tree), seen.keep(1.5)

    found, norm, measured, kept = shown(tree)
    assert norm == measured == [1.0, 2.0]
    assert kept == [1.0, 1.5]
    assert found["b"] == [1.0, 1.0]
    helpers.assert_identical(found["a"], tree["a"])


def test_a_rule_may_return_a_threshold_for_each_norm():
    @dataclasses.dataclass(frozen=True)
    class Half:
        def init(self, norm):
            return ()

        def update(self, seen, memory):
            return jax.tree.map(lambda n: n / 2, seen.norm), memory

    tree = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([10.0])}
    tx = optclip.clip_by_norm(Half())
    found, _ = helpers.quick_jit(tx.update)(tree, tx.init(tree))
    chex.assert_trees_all_close(found, jax.tree.map(lambda x: x / 2, tree))


def test_memory_keeps_its_dtype():
    """A rule that widens its memory does not change the state's type."""

    @dataclasses.dataclass(frozen=True)
    class Counter:
        def init(self, norm):
            return jnp.zeros((), jnp.bfloat16)

        def update(self, seen, memory):
            return 1.0, memory.astype(jnp.float32) + 1.0

    tx = optclip.clip_by_global_norm(Counter())
    state = jax.eval_shape(tx.init, jnp.ones(2))
    _, after = jax.eval_shape(tx.update, jnp.ones(2), state)
    assert after == state


def test_memory_is_not_cut_to_whole_numbers():
    class Mean:
        def init(self, norm):
            return jnp.zeros((), jnp.int32)

        def update(self, seen, memory):
            return 1.0, 0.9 * memory + 0.1 * seen.norm

    tx = optclip.clip_by_global_norm(Mean())
    with pytest.raises(ValueError, match="must be floats, got int32"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_a_transformation_or_a_class_is_no_rule():
    assert is_rule(thresholds.constant(1.0))
    assert not is_rule(optax.adam(1e-3))
    assert not is_rule(Watcher)
    with pytest.raises(
        TypeError, match="max_norm` must be .*whole clip.*Give a rule, such"
    ):
        optclip.clip_by_global_norm(optclip.recipes.zclip())
    with pytest.raises(
        TypeError, match="max_norm` must be .*Give an instance of the class, Watcher"
    ):
        optclip.clip_by_global_norm(Watcher)


def test_a_rule_that_was_not_called_is_named():
    tx = optclip.clip_by_global_norm(optclip.thresholds.quantile)
    with pytest.raises(
        TypeError, match="must return a number, got a rule, Quantile.*the rule itself"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_constants_are_compared_and_hashed():
    array = jnp.ones(2)
    one = thresholds.constant(array)
    assert one == thresholds.constant(array) != thresholds.constant(array + 0)
    assert thresholds.constant(1.0) == thresholds.constant(1.0)
    assert len({one, thresholds.constant(array), thresholds.constant(1.0)}) == 2
    assert thresholds.constant(1.0) != 1.0


@pytest.mark.parametrize("rule", ["ema", "zscore", "mean_over_rms", "second_moment"])
def test_a_memory_of_float32_beside_updates_of_float64(rule):
    over = "element" if rule == "second_moment" else "leaf"
    tx = optclip.clip_by(getattr(thresholds, rule)(), over=over)
    with jax.enable_x64(True):
        state = tx.init(jnp.ones(2, jnp.float32))
        _, new = tx.update(jnp.ones(2, jnp.float64), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(new.clip_memory, state.clip_memory)


class Whole:
    """A user's rule whose threshold is a whole number."""

    def init(self, norm):
        return ()

    def update(self, seen, memory):
        return jnp.int32(2), memory


def test_a_rule_may_return_a_whole_number():
    tx = optclip.clip_by_global_norm(Whole())
    update = helpers.quick_jit(tx.update)
    found, _ = update(jnp.array([5.0]), tx.init(jnp.zeros(1)))
    np.testing.assert_allclose(found, [2.0])


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
@pytest.mark.parametrize("over", ["tree", "leaf", "element"])
def test_a_rule_that_knows_nothing_yet_leaves_the_policy_in_force(policy, over):
    """Its inf means that it does not clip; a user's means not to touch."""
    rule = thresholds.mean_plus_std(3.0, 8)
    tx = optclip.clip_by(rule, over=over, nonfinite=policy)
    untouched = optclip.clip_by(INF, over=over, nonfinite=policy)
    updates = jnp.array([jnp.nan, 1.0])
    found, _ = helpers.quick_jit(tx.update)(updates, tx.init(updates))
    good = jnp.nan if policy == "propagate" and over != "element" else 1.0
    if policy == "zero" and over != "element":
        good = 0.0
    bad = jnp.nan if policy == "propagate" else 0.0
    np.testing.assert_array_equal(found, [bad, good])
    found, _ = helpers.quick_jit(untouched.update)(updates, untouched.init(updates))
    np.testing.assert_array_equal(found, updates)


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
def test_lengths_have_a_least(make, least):
    make(least)
    with pytest.raises(ValueError, match=f"an int from {least} to"):
        make(least - 1)


def test_a_finite_gradient_of_an_infinite_norm_in_a_warm_up():
    """A rule that lets all pass does not let it pass, and it counts as not finite."""
    for policy in ("zero", "drop"):
        tx = optclip.clip_by_global_norm(optclip.thresholds.zscore(), nonfinite=policy)
        x = jnp.full(4, 3e38)
        clipped, state = tx.update(x, tx.init(x))
        np.testing.assert_array_equal(clipped, np.zeros(4))
        assert optclip.metrics(state)["clip/nonfinite"] == 1
        assert not np.any(state.clip_memory[0][0].mean)
