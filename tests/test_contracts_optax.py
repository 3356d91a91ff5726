"""Every transformation inside every wrapper of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests import helpers
from tests.registry import ENTRIES, SCALAR, numpy_tree

every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
scalar = pytest.mark.parametrize("entry", SCALAR, ids=lambda e: e.id)
trees = pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixed"])


def make_tree(kind):
    if kind == "mixed":
        return helpers.mixed_gradients()
    return helpers.gradients(dtype=jnp.dtype(kind))


@every
def test_extra_args_and_params(entry):
    """`update` takes any extra argument, and parameters or none."""
    tree = helpers.gradients()
    tx = helpers.strict(entry.make())
    state = tx.init(tree)
    bare, _ = tx.update(tree, state)
    full, _ = tx.update(tree, state, tree, value=jnp.float32(1.0), batch=None)
    assert helpers.differs(bare, tree)
    helpers.assert_identical(bare, full)


@scalar
@trees
def test_inject_constant(entry, kind):
    """A hyperparameter that can be set in the state, in any dtype of gradients."""
    tree = make_tree(kind)
    name, c = entry.threshold
    factory = optax.inject_hyperparams(entry.factory, static_args=entry.statics)
    tx = factory(**{name: c}, **entry.kwargs)
    state = tx.init(tree)
    step = jax.jit(tx.update)
    found, state = step(tree, state, tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)), ulps=4)
    state = optax.tree.set(state, **{name: jnp.asarray(0.5 * c)})
    found, state = step(tree, state, tree)
    expected = entry.expected(numpy_tree(tree), 0.5 * c)
    helpers.assert_close(found, expected, ulps=4)


@scalar
@trees
def test_inject_schedule(entry, kind):
    tree = make_tree(kind)
    name, c = entry.threshold
    factory = optax.inject_hyperparams(entry.factory, static_args=entry.statics)
    schedule = optax.piecewise_constant_schedule(c, {1: 0.5})
    tx = factory(**{name: schedule}, **entry.kwargs)
    state = tx.init(tree)
    for value in (c, 0.5 * c):
        found, state = jax.jit(tx.update)(tree, state, tree)
        assert helpers.differs(found, tree)
        expected = entry.expected(numpy_tree(tree), value)
        helpers.assert_close(found, expected, ulps=4)


@every
def test_chain_with_adam(entry):
    """Before the optimizer it clips gradients, after it updates; metrics see both."""
    params = helpers.gradients(1)
    tree = helpers.gradients()
    tx = optax.chain(entry.make(), optax.adam(0.1), entry.make(name="after"))
    clipped, _ = entry.make().update(tree, entry.make().init(tree))
    adam, _ = optax.adam(0.1).update(clipped, optax.adam(0.1).init(params), params)
    expected, _ = entry.make().update(adam, entry.make().init(params), params)
    found, state = jax.jit(tx.update)(tree, tx.init(params), params)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, expected, ulps=64)
    assert {"clip/rate", "after/rate"} <= set(_rates(state))


def _rates(state):
    names = {key.split("/")[0] for key in optclip.metrics(state)}
    return {f"{name}/rate" for name in names}


@every
def test_masked(entry):
    """What the mask leaves out is untouched and counts in no norm."""
    tree = helpers.gradients()
    mask = {"dense": True, "out": False}
    tx = optax.masked(entry.make(), mask)
    found, state = jax.jit(tx.update)(tree, tx.init(tree))
    helpers.assert_identical(found["out"], tree["out"])
    expected = entry.expected(numpy_tree({"dense": tree["dense"], "out": []}))
    helpers.assert_close(found["dense"], expected["dense"])
    assert optclip.metrics(state)


@every
def test_partition(entry):
    """Each part is clipped by its own norm, which is what optax promises."""
    tree = helpers.gradients()
    tx = optax.partition(
        {"a": entry.make(), "b": entry.make(name="other")},
        {"dense": "a", "out": "b"},
    )
    found, state = jax.jit(tx.update)(tree, tx.init(tree))
    numpy = numpy_tree(tree)
    expected = {
        "dense": entry.expected({"dense": numpy["dense"], "out": []})["dense"],
        "out": entry.expected({"dense": {}, "out": numpy["out"]})["out"],
    }
    assert helpers.differs(found, tree)
    helpers.assert_close(found, expected)
    assert _rates(state) == {"clip/rate", "other/rate"}


@every
def test_multi_steps(entry):
    """Accumulated gradients are clipped once, as their mean."""
    params = helpers.gradients(3)
    first, second = helpers.gradients(1), helpers.gradients(2)
    tx = optax.MultiSteps(entry.make(), every_k_schedule=2)
    state = tx.init(params)
    update = jax.jit(tx.update)
    zero, state = update(first, state, params)
    assert not any(np.any(x) for x in jax.tree.leaves(zero))
    found, state = update(second, state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert helpers.differs(found, mean)
    helpers.assert_close(found, entry.expected(numpy_tree(mean)), ulps=16)
    rates = [v for k, v in optclip.metrics(state).items() if "rate" in k]
    assert max(float(rate) for rate in rates) == 1.0


@every
def test_flatten(entry):
    """Tree and element clips survive concatenation; the others see one long leaf."""
    tree = helpers.gradients()
    tx = optax.flatten(entry.make())
    found, _ = jax.jit(tx.update)(tree, tx.init(tree))
    helpers.assert_same_types(found, tree)
    if entry.takes_flat:
        assert helpers.differs(found, tree)
        helpers.assert_close(found, entry.expected(numpy_tree(tree)))


@every
def test_apply_if_finite(entry):
    """A non-finite update is refused by optax, the state of the clip kept."""
    tree = helpers.gradients()
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), tree)
    tx = optax.apply_if_finite(entry.make(), max_consecutive_errors=3)
    update = jax.jit(tx.update)
    found, state = update(tree, tx.init(tree))
    helpers.assert_close(found, entry.expected(numpy_tree(tree)))
    zeros, after = update(bad, state)
    assert not any(np.any(x) for x in jax.tree.leaves(zeros))
    helpers.assert_identical(after.inner_state, state.inner_state)


@every
def test_conditionally_transform(entry):
    tree = helpers.gradients()
    tx = optax.conditionally_transform(entry.make(), lambda step: step > 0)
    update = jax.jit(tx.update)
    first, state = update(tree, tx.init(tree))
    helpers.assert_identical(first, tree)
    second, state = update(tree, state)
    helpers.assert_close(second, entry.expected(numpy_tree(tree)))
