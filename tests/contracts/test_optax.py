"""Every transformation inside every wrapper of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers
from tests.support.helpers import quick_jit
from tests.support.registry import ENTRIES, SCALAR, numpy_tree

every = pytest.mark.covering(entry=ENTRIES, kind=helpers.KINDS)
scalar = pytest.mark.covering(entry=SCALAR, kind=helpers.KINDS)


def stepped(tx, *steps, params=None):
    """What each of these gradients becomes in turn, and the state after all."""
    update, state, found = quick_jit(tx.update), tx.init(steps[0]), []
    for gradients in steps:
        updates, state = update(gradients, state, params)
        found.append(updates)
    return *found, state


def is_zero(tree):
    return not any(np.any(x) for x in jax.tree.leaves(tree))


@every
def test_extra_args_and_params(entry, kind):
    """`update` takes any extra argument, and parameters or none."""
    tree = helpers.typed(kind)
    tx = helpers.strict(entry.make())
    state, update = tx.init(tree), quick_jit(tx.update)
    bare, _ = update(tree, state)
    full, _ = update(tree, state, tree, value=jnp.float32(1.0), batch=None)
    assert helpers.differs(bare, tree)
    helpers.assert_identical(bare, full)


@scalar
def test_an_injected_constant_can_be_set(entry, kind):
    """A hyperparameter that can be set in the state, in any dtype of gradients."""
    tree = helpers.typed(kind)
    name, c = entry.threshold
    factory = optax.inject_hyperparams(entry.factory, static_args=entry.statics)
    tx = factory(**{name: c}, **entry.kwargs)
    state, update = tx.init(tree), quick_jit(tx.update)
    for value in (c, 0.5 * c):
        state = optax.tree.set(state, **{name: jnp.asarray(value)})
        found, state = update(tree, state, tree)
        assert helpers.differs(found, tree)
        expected = entry.expected(numpy_tree(tree), value)
        helpers.assert_close(found, expected, ulps=4)


@scalar
def test_an_injected_schedule_is_followed(entry, kind):
    tree = helpers.typed(kind)
    name, c = entry.threshold
    factory = optax.inject_hyperparams(entry.factory, static_args=entry.statics)
    schedule = optax.piecewise_constant_schedule(c, {1: 0.5})
    tx = factory(**{name: schedule}, **entry.kwargs)
    *found, _ = stepped(tx, tree, tree, params=tree)
    for clipped, value in zip(found, (c, 0.5 * c), strict=True):
        assert helpers.differs(clipped, tree)
        expected = entry.expected(numpy_tree(tree), value)
        helpers.assert_close(clipped, expected, ulps=4)


@pytest.mark.covering(entry=ENTRIES)
def test_it_clips_before_and_after_adam(entry):
    """Before the optimizer it clips gradients, after it updates; metrics see both."""
    tree = helpers.gradients()
    tx = optax.chain(entry.make(), optax.adam(2.0), entry.make(name="after"))
    found, state = stepped(tx, tree, params=helpers.gradients(1))
    clipped = entry.expected(numpy_tree(tree))
    # Adam's first step: the gradient over its own size.
    adam = jax.tree.map(lambda g: -2.0 * g / (np.abs(g) + 1e-8), clipped)
    expected = entry.expected(adam)
    assert helpers.differs(clipped, tree)
    assert helpers.differs(expected, adam)
    helpers.assert_close(found, expected, ulps=64)
    assert {"clip/rate", "after/rate"} <= _rates(state)


def _rates(state):
    names = {key.split("/")[0] for key in optclip.metrics(state)}
    return {f"{name}/rate" for name in names}


@every
def test_what_a_mask_leaves_out_is_untouched(entry, kind):
    """What the mask leaves out is untouched and counts in no norm."""
    tree = helpers.typed(kind)
    tx = optax.masked(entry.make(), {"dense": True, "out": False})
    found, state = stepped(tx, tree)
    helpers.assert_identical(found["out"], tree["out"])
    expected = entry.expected(numpy_tree({"dense": tree["dense"], "out": []}))
    helpers.assert_close(found["dense"], expected["dense"])
    assert optclip.metrics(state)


@every
def test_each_part_is_clipped_by_its_own_norm(entry, kind):
    """Each part is clipped by its own norm, which is what optax promises."""
    tree = helpers.typed(kind)
    parts = {"a": entry.make(), "b": entry.make(name="other")}
    tx = optax.partition(parts, {"dense": "a", "out": "b"})
    found, state = stepped(tx, tree)
    wide = numpy_tree(tree)
    expected = {
        "dense": entry.expected({"dense": wide["dense"], "out": []})["dense"],
        "out": entry.expected({"dense": {}, "out": wide["out"]})["out"],
    }
    assert helpers.differs(found, tree)
    helpers.assert_close(found, expected)
    assert _rates(state) == {"clip/rate", "other/rate"}


@every
def test_accumulated_gradients_are_clipped_once(entry, kind):
    """Accumulated gradients are clipped once, as their mean."""
    mean = helpers.typed(kind, 1)
    # Of a mean that 16 bits have: optax 0.2.6 keeps it in the dtype of the gradients.
    twice, nothing = jax.tree.map(lambda x: 2 * x, mean), optax.tree.zeros_like(mean)
    tx = optax.MultiSteps(entry.make(), every_k_schedule=2)
    zero, found, state = stepped(tx, twice, nothing, params=helpers.typed(kind, 3))
    assert is_zero(zero)
    assert helpers.differs(found, mean)
    helpers.assert_close(found, entry.expected(numpy_tree(mean)), ulps=16)
    rates = [v for k, v in optclip.metrics(state).items() if "rate" in k]
    assert max(float(rate) for rate in rates) == 1.0


@pytest.mark.covering(entry=ENTRIES)
def test_a_flattened_tree_is_clipped_as_one_leaf(entry):
    """Tree and element clips survive concatenation; the others see one long leaf."""
    tree = helpers.gradients()
    found, _ = stepped(optax.flatten(entry.make()), tree)
    helpers.assert_same_types(found, tree)
    if entry.takes_flat:
        assert helpers.differs(found, tree)
        helpers.assert_close(found, entry.expected(numpy_tree(tree)))


@every
def test_apply_if_finite_keeps_the_state(entry, kind):
    """A non-finite update is refused by optax, the state of the clip kept."""
    tree = helpers.typed(kind)
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), tree)
    tx = optax.apply_if_finite(entry.make(), max_consecutive_errors=3)
    update = quick_jit(tx.update)
    found, state = update(tree, tx.init(tree))
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)))
    zeros, after = update(bad, state)
    assert is_zero(zeros)
    helpers.assert_identical(after.inner_state, state.inner_state)


@every
def test_it_clips_only_when_the_condition_holds(entry, kind):
    tree = helpers.typed(kind)
    tx = optax.conditionally_transform(entry.make(), lambda step: step > 0)
    first, second, _ = stepped(tx, tree, tree)
    helpers.assert_identical(first, tree)
    assert helpers.differs(second, tree)
    helpers.assert_close(second, entry.expected(numpy_tree(tree)))
