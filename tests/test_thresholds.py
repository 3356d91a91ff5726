"""Constants, schedules, and what a rule is shown."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from optclip.thresholds._rule import is_rule
from tests import helpers


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
    _, state = tx.update(grads, state, params, value=jnp.float32(7.0))
    shape, seen = rule.log
    assert shape.shape == ()
    assert seen.norm == 5.0
    assert seen.keep(jnp.float32(2.0)) == 2.0
    assert seen.keep(jnp.float32(9.0)) == 5.0
    assert seen.measure(params) == 10.0
    np.testing.assert_array_equal(seen.params, params)
    assert seen.step == 0
    assert seen.extra["value"] == 7.0


def test_a_rule_in_a_tree_sees_its_own_part():
    rule = Watcher()
    tree = {"a": jnp.array([3.0, 4.0]), "b": [jnp.array([1.0]), jnp.array([2.0])]}
    tx = optclip.clip_by_norm({"a": None, "b": rule})
    found, _ = tx.update(tree, tx.init(tree), tree)
    seen = rule.log[-1]
    assert [float(n) for n in seen.norm] == [1.0, 2.0]
    assert [float(n) for n in seen.measure(tree)] == [1.0, 2.0]
    assert [float(n) for n in seen.keep(1.5)] == [1.0, 1.5]
    assert [float(n[0]) for n in found["b"]] == [1.0, 1.0]
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
    found, _ = tx.update(tree, tx.init(tree))
    helpers.assert_close(found, jax.tree.map(lambda x: x / 2, tree), 2)


def test_memory_keeps_its_dtype():
    """A rule that widens its memory does not change the state's type."""

    @dataclasses.dataclass(frozen=True)
    class Counter:
        def init(self, norm):
            return jnp.zeros((), jnp.bfloat16)

        def update(self, seen, memory):
            return 1.0, memory.astype(jnp.float32) + 1.0

    tx = optclip.clip_by_global_norm(Counter())
    state = tx.init(jnp.ones(2))
    _, after = tx.update(jnp.ones(2), state)
    helpers.assert_same_types(after, state)


def test_memory_is_not_cut_to_whole_numbers():
    class Mean:
        def init(self, norm):
            return jnp.zeros((), jnp.int32)

        def update(self, seen, memory):
            return 1.0, 0.9 * memory + 0.1 * seen.norm

    tx = optclip.clip_by_global_norm(Mean())
    with pytest.raises(ValueError, match="int32, which would cut them to whole"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("rule", ["quantile", "mean_plus_std"])
def test_a_state_of_another_window(rule):
    make = getattr(optclip.thresholds, rule)
    tx, longer = (optclip.clip_by_global_norm(make(window=n)) for n in (4, 8))
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="holds the last 4 norms, but window=8"):
        longer.update(jnp.ones(2), state)


def test_what_is_a_rule():
    assert is_rule(thresholds.constant(1.0))
    assert not is_rule(optax.adam(1e-3))
    assert not is_rule(Watcher)
    with pytest.raises(TypeError, match="max_norm holds a transf.*Give a rule, such"):
        optclip.clip_by_global_norm(optclip.recipes.zclip())
    with pytest.raises(
        TypeError, match="max_norm holds the class Watcher. Give an instance"
    ):
        optclip.clip_by_global_norm(Watcher)


def test_a_rule_that_was_not_called():
    tx = optclip.clip_by_global_norm(optclip.thresholds.quantile)
    with pytest.raises(TypeError, match="returned a rule, Quantile. Give the rule"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_none_alone_is_no_threshold():
    for make in (optclip.clip_by_global_norm, optclip.clip_by_norm, optclip.clip_by):
        with pytest.raises(TypeError, match="=None is no threshold.*inf"):
            make(None)
    with pytest.raises(TypeError, match="max_norm=None is no threshold.*inf"):
        optclip.functional.clip_by_global_norm(jnp.ones(2), None)


def test_constant_schedule_and_bounds_check_what_they_get():
    with pytest.raises(ValueError, match="value=-1.*negative"):
        thresholds.constant(-1)
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        thresholds.schedule(3)
    with pytest.raises(ValueError, match="lower=2.*above upper=1"):
        thresholds.bounds(2.0, 1.0)
    with pytest.raises(ValueError, match="lower=nan is NaN"):
        thresholds.bounds(float("nan"))
    with pytest.raises(TypeError, match="upper holds 'x'"):
        thresholds.bounds(0.0, "x")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, "neither form"),
        ({"limit": 1.0, "lower": -1.0}, "both forms"),
        ({"limit": 1.0, "upper": 1.0}, "both forms"),
    ],
)
def test_one_form_of_value_clip_only(arguments, given):
    with pytest.raises(TypeError, match=f"{given} given.*Give limit alone"):
        optclip.clip_by_value(**arguments)


def test_scheduled_bounds():
    tx = optclip.clip_by_value(lower=lambda step: -1.0 - step, upper=2.0)
    x = jnp.array([-9.0, 9.0])
    state = tx.init(x)
    for expected in ([-1.0, 2.0], [-2.0, 2.0]):
        found, state = tx.update(x, state)
        np.testing.assert_array_equal(found, expected)
