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


def test_what_a_rule_sees():
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


@pytest.mark.parametrize("rule", ["quantile", "mean_plus_std"])
def test_a_state_of_another_window(rule):
    make = getattr(optclip.thresholds, rule)
    tx, longer = (optclip.clip_by_global_norm(make(window=n)) for n in (4, 8))
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="window=8.*`window` must be 4, .*got 8"):
        longer.update(jnp.ones(2), state)


def test_what_is_a_rule():
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


def test_a_rule_that_was_not_called():
    tx = optclip.clip_by_global_norm(optclip.thresholds.quantile)
    with pytest.raises(
        TypeError, match="must return a number, got a rule, Quantile.*the rule itself"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_none_alone_is_no_threshold():
    for make in (optclip.clip_by_global_norm, optclip.clip_by_norm, optclip.clip_by):
        with pytest.raises(TypeError, match="must be a number .*inf.*None"):
            make(None)
    with pytest.raises(TypeError, match="`max_norm` must be a number .*inf.*None"):
        optclip.functional.clip_by_global_norm(jnp.ones(2), None)


def test_constant_schedule_and_bounds_check_what_they_get():
    with pytest.raises(ValueError, match="`value` must be 0 or more .*-1"):
        thresholds.constant(-1)
    with pytest.raises(TypeError, match="`function` must be an optax schedule.*got 3"):
        thresholds.schedule(3)
    with pytest.raises(ValueError, match="lower=2.*upper=1"):
        thresholds.bounds(2.0, 1.0)
    with pytest.raises(
        ValueError, match="`lower` must be a number and not NaN, got nan"
    ):
        thresholds.bounds(float("nan"))
    with pytest.raises(TypeError, match="`upper` must be .*got 'x'"):
        thresholds.bounds(0.0, "x")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, "neither"),
        ({"limit": 1.0, "lower": -1.0}, "both"),
        ({"limit": 1.0, "upper": 1.0}, "both"),
    ],
)
def test_one_form_of_value_clip_only(arguments, given):
    with pytest.raises(TypeError, match=f"got {given}: .*Give limit alone"):
        optclip.clip_by_value(**arguments)


def test_scheduled_bounds():
    tx = optclip.clip_by_value(lower=lambda step: -1.0 - step, upper=2.0)
    x = jnp.array([-9.0, 9.0])
    state, update = tx.init(x), helpers.quick_jit(tx.update)
    for expected in ([-1.0, 2.0], [-2.0, 2.0]):
        found, state = update(x, state)
        np.testing.assert_array_equal(found, expected)


def test_constants_are_compared_and_hashed():
    array = jnp.ones(2)
    one = thresholds.constant(array)
    assert one == thresholds.constant(array) != thresholds.constant(array + 0)
    assert thresholds.constant(1.0) == thresholds.constant(1.0)
    assert len({one, thresholds.constant(array), thresholds.constant(1.0)}) == 2
    assert thresholds.constant(1.0) != 1.0


def test_an_average_that_would_stay_zero_is_refused():
    with pytest.raises(
        ValueError, match=r"`decay` must be below 1, got 1.*clip all to 0"
    ):
        thresholds.ema(decay=1.0, start="zero")
    with pytest.raises(
        ValueError, match=r"`decay` must be below 1, got 1.*clip all to 0"
    ):
        thresholds.moment(decay=1.0)


def test_nothing_is_clipped_of_a_leaf_of_zeros():
    """By leaf a rule's threshold of it is 0 too; the record says that it was left."""
    tx = optclip.clip_by_norm(thresholds.quantile(0.5, window=4), record="leaves")
    tree = {"a": jnp.zeros(3), "b": jnp.ones(3), "c": jnp.zeros(0)}
    _, state = tx.update(tree, tx.init(tree))
    _, state = tx.update(tree, state)
    found = optclip.metrics(state)
    assert found["clip/threshold/a"] == 0
    for leaf in "abc":
        assert found[f"clip/coefficient/{leaf}"] == 1
        assert found[f"clip/rate/{leaf}"] == 0


@pytest.mark.parametrize("rule", ["ema", "zscore", "mean_over_rms", "second_moment"])
def test_a_memory_of_float32_beside_updates_of_float64(rule):
    over = "element" if rule == "second_moment" else "leaf"
    tx = optclip.clip_by(getattr(thresholds, rule)(), over=over)
    with jax.enable_x64(True):
        state = tx.init(jnp.ones(2, jnp.float32))
        _, new = tx.update(jnp.ones(2, jnp.float64), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(new.clip_memory, state.clip_memory)


def test_a_nan_threshold_is_recorded_as_such():
    tx = optclip.clip_by_global_norm(lambda step: jnp.nan)
    _, state = tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))
    assert np.isnan(optclip.metrics(state)["clip/coefficient"])
