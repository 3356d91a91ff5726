"""Every transformation inside every wrapper of optax.

All entries take extra arguments; entries of each kind of state are inside every
wrapper. The wrappers of an entry are updated side by side in one compiled step,
called twice. The scope of the parameter puts the tests of one entry in a row, so that
one worker runs them and compiles the step once.
"""

import functools
import re

import jax
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers
from tests.support.registry import ENTRIES, SCALAR, by_trait

# Wrappers pass trees and states on. Of the scopes, those differ whose norm spans
# leaves; the others are single leaves to a wrapper.
SPANNING = [e for e in ENTRIES if e.scope in ("tree", "groups", "matrices")]
WRAPPED = by_trait(SPANNING, "scope", "state")
every, each_trait, each_scalar_trait = (
    pytest.mark.parametrize(
        "entry", entries, ids=lambda entry: entry.id, scope="module"
    )
    for entries in (
        ENTRIES,
        WRAPPED,
        by_trait([e for e in SPANNING if e in SCALAR], "scope"),
    )
)
TREE = helpers.mixed_gradients()
# Adam and `flatten` bring leaves of several dtypes to one.
WIDE = helpers.gradients()
MEAN = helpers.mixed_gradients(1)


def scaled(tree, by):
    return jax.tree.map(lambda x: jax.device_put(np.array(x) * x.dtype.type(by)), tree)


TWICE, NOTHING, NAN = scaled(MEAN, 2), scaled(MEAN, 0), scaled(TREE, np.nan)


def injected(entry, threshold):
    factory = optax.inject_hyperparams(entry.factory, static_args=entry.statics)
    return factory(**{entry.threshold[0]: threshold}, **entry.kwargs)


def wrapped(entry):
    """Return each wrapper with its gradients in the first and second step."""
    clip = entry.make()
    parts = {"a": clip, "b": entry.make(name="other")}
    finite = optax.apply_if_finite(clip, max_consecutive_errors=3)
    return {
        "adam": (optax.chain(clip, optax.adam(2.0), entry.make(name="after")), WIDE),
        "masked": (optax.masked(clip, {"dense": True, "out": False}), TREE),
        "partition": (optax.partition(parts, {"dense": "a", "out": "b"}), TREE),
        # The mean is exact in 16 bits: optax 0.2.6 keeps it in the gradients' dtype.
        "multi_steps": (optax.MultiSteps(clip, 2), TWICE, NOTHING),
        "flatten": (optax.flatten(clip), WIDE),
        "finite": (finite, TREE, NAN),
    }


@functools.cache
def outcome(entry):
    """Return the updates and the state of each wrapper after either step."""
    cases = wrapped(entry)
    grads = [{name: case[i] for name, case in cases.items()} for i in (1, -1)]
    states = {name: case[0].init(case[1]) for name, case in cases.items()}

    @helpers.quick_jit
    def step(grads, states):
        return {
            name: case[0].update(grads[name], states[name], grads[name])
            for name, case in cases.items()
        }

    steps = [step(grads[0], states)]
    states = {name: state for name, (_, state) in steps[0].items()}
    steps.append(step(grads[1], states))
    return {name: [each[name] for each in steps] for name in cases}


def assert_clipped(entry, found, tree, threshold=None, ulps=8):
    expected = entry.expected(helpers.as_float64(tree), threshold)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, expected, ulps=ulps)


def is_zero(tree):
    return not any(np.any(x) for x in jax.tree.leaves(tree))


def names(state):
    return {key.split("/")[0] for key in optclip.metrics(state)}


@every
def test_update_takes_extra_arguments_and_parameters_or_none(entry):
    """They change nothing: both calls trace to the same program."""
    tx = helpers.tx_without_promotion(entry.make())
    state = tx.init(TREE)

    def extra(grads, state):
        return tx.update(grads, state, grads, value=np.float32(1), batch=None)

    bare, more = (
        re.sub(" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(update)(TREE, state)))
        for update in (lambda grads, state: tx.update(grads, state), extra)
    )
    assert more == bare


@each_scalar_trait
def test_inject_hyperparams_threshold_can_be_set_or_scheduled(entry):
    name, c = entry.threshold
    halved = optax.piecewise_constant_schedule(c, {1: 0.5})
    constant, scheduled = injected(entry, c), injected(entry, halved)

    @helpers.quick_jit
    def step(grads, states):
        return constant.update(grads, states[0]), scheduled.update(grads, states[1])

    states = constant.init(TREE), scheduled.init(TREE)
    for value in (c, 0.5 * c):
        (set_to, state), (found, schedule) = step(TREE, states)
        assert_clipped(entry, set_to, TREE, value, ulps=4)
        assert_clipped(entry, found, TREE, value, ulps=4)
        half = 0.5 * optax.tree.get(state, name)
        states = optax.tree.set(state, **{name: half}), schedule


@each_trait
def test_chain_clips_before_and_after_adam(entry):
    """Before the optimizer it clips gradients, after it updates; metrics has both."""
    found, state = outcome(entry)["adam"][0]
    clipped = entry.expected(helpers.as_float64(WIDE))
    # Adam's first step: the gradient over its own size.
    adam = jax.tree.map(lambda g: -2.0 * g / (np.abs(g) + 1e-8), clipped)
    expected = entry.expected(adam)
    assert helpers.differs(clipped, WIDE)
    assert helpers.differs(expected, adam)
    helpers.assert_close(found, expected, ulps=64)
    assert names(state) == {"clip", "after"}


@each_trait
def test_masked_leaves_stay_identical_and_enter_no_norm(entry):
    found, state = outcome(entry)["masked"][0]
    helpers.assert_identical(found["out"], TREE["out"])
    expected = entry.expected(helpers.as_float64({"dense": TREE["dense"], "out": []}))
    helpers.assert_close(found["dense"], expected["dense"])
    assert names(state) == {"clip"}


@each_trait
def test_partition_clips_each_part_by_its_own_norm(entry):
    found, state = outcome(entry)["partition"][0]
    wide = helpers.as_float64(TREE)
    expected = {
        "dense": entry.expected({"dense": wide["dense"], "out": []})["dense"],
        "out": entry.expected({"dense": {}, "out": wide["out"]})["out"],
    }
    assert helpers.differs(found, TREE)
    helpers.assert_close(found, expected)
    assert names(state) == {"clip", "other"}


@each_trait
def test_multi_steps_clips_the_mean_once(entry):
    (zero, _), (found, state) = outcome(entry)["multi_steps"]
    assert is_zero(zero)
    assert_clipped(entry, found, MEAN, ulps=16)
    rates = [v for k, v in optclip.metrics(state).items() if "rate" in k]
    assert max(float(rate) for rate in rates) == 1.0


@each_trait
def test_flatten_clips_the_concatenation(entry):
    """Tree and element clips do not depend on it; the others clip one long leaf."""
    found, _ = outcome(entry)["flatten"][0]
    helpers.assert_same_types(found, WIDE)
    if entry.takes_flat:
        assert_clipped(entry, found, WIDE)


@each_trait
def test_apply_if_finite_keeps_the_state_of_the_clip(entry):
    (found, before), (zeros, after) = outcome(entry)["finite"]
    assert_clipped(entry, found, TREE)
    assert is_zero(zeros)
    helpers.assert_identical(after.inner_state, before.inner_state)
