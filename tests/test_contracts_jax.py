"""Every transformation under every transformation of JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests import helpers
from tests.registry import ENTRIES, SCALAR, numpy_tree

every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
scalar = pytest.mark.parametrize("entry", SCALAR, ids=lambda e: e.id)


def clip(tx, tree):
    updates, _ = tx.update(tree, tx.init(tree))
    return updates


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@every
def test_jit_is_eager(entry):
    tree = helpers.gradients()
    tx = helpers.strict(entry.make())
    eager, eager_state = tx.update(tree, tx.init(tree))
    jitted, jitted_state = jax.jit(tx.update)(tree, tx.init(tree))
    assert helpers.differs(eager, tree)
    helpers.assert_close(jitted, eager, ulps=2)
    helpers.assert_close(jitted_state, eager_state, ulps=2)


@every
def test_scan_cond_while(entry):
    """The state has one structure, shape and dtype for ever, so all loops take it."""
    tree = helpers.gradients()
    tx = helpers.strict(entry.make())

    def step(carry, _):
        state, _ = carry
        updates, state = tx.update(tree, state)
        return (state, updates), optax.tree.norm(updates)

    (scanned, last), _ = jax.lax.scan(step, (tx.init(tree), tree), None, length=5)
    assert helpers.differs(last, tree)

    def body(carry):
        return step(carry, None)[0]

    looped, _ = jax.lax.while_loop(
        lambda carry: carry[0].clip_step < 5, body, (tx.init(tree), tree)
    )
    helpers.assert_identical(looped, scanned)
    once = jax.lax.cond(
        jnp.array(True), lambda s: tx.update(tree, s)[1], lambda s: s, tx.init(tree)
    )
    helpers.assert_same_types(once, scanned)


@every
def test_state_is_stable(entry):
    """Also where the gradients have other dtypes than the parameters."""
    params = helpers.gradients(dtype=jnp.bfloat16)
    tx = helpers.strict(entry.make())
    state = tx.init(params)
    for tree in (params, helpers.gradients(), helpers.mixed_gradients()):
        _, after = tx.update(tree, state)
        helpers.assert_same_types(after, state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


@every
def test_abstract_init(entry):
    """`init` looks at shapes and dtypes only."""
    tree = helpers.gradients()
    tx = helpers.strict(entry.make())
    shapes = jax.eval_shape(lambda: tree)
    for abstract in (jax.eval_shape(tx.init, shapes), tx.init(shapes)):
        helpers.assert_same_types(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract),
            jax.tree.map(jnp.zeros_like, tx.init(tree)),
        )


@every
def test_vmap_over_gradients(entry):
    """Per-example clipping: each of a batch by its own norms."""
    trees = [helpers.gradients(seed) for seed in range(3)]
    tx = helpers.strict(entry.make())
    found = jax.vmap(lambda t: clip(tx, t))(stack(trees))
    assert helpers.differs(found, stack(trees))
    expected = [entry.expected(numpy_tree(t)) for t in trees]
    helpers.assert_close(found, jax.tree.map(lambda *x: np.stack(x), *expected))


@scalar
def test_vmap_over_thresholds(entry):
    tree = helpers.gradients()
    c = entry.threshold[1]
    values = jnp.array([c, 0.5 * c, 0.25 * c])
    found = jax.vmap(lambda t: clip(helpers.strict(entry.make(t)), tree))(values)
    expected = [entry.expected(numpy_tree(tree), float(v)) for v in values]
    helpers.assert_close(found, jax.tree.map(lambda *x: np.stack(x), *expected))


@every
def test_donation(entry):
    """Gradients and state may be donated: the clip works in place."""
    tree = helpers.gradients()
    expected = clip(entry.make(), tree)
    assert helpers.differs(expected, tree)
    tx = entry.make()
    state = tx.init(tree)
    found, _ = jax.jit(tx.update, donate_argnums=(0, 1))(tree, state)
    helpers.assert_close(found, expected, ulps=2)
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))


@every
def test_no_host_transfer(entry):
    tree = helpers.gradients()
    tx = entry.make()
    state = tx.init(tree)
    update = jax.jit(tx.update)
    with jax.transfer_guard("disallow"):
        found, _ = jax.block_until_ready(update(tree, state))
    assert helpers.differs(found, tree)
    text = update.lower(tree, state).compile().as_text()
    assert not re.search(r"callback|infeed|outfeed| send\(| recv\(", text)


@every
def test_debug_nans(entry):
    """Nothing hidden in a branch not taken is NaN, zeros included."""
    tx = entry.make()
    tree = helpers.gradients()
    with jax.debug_nans(True):
        for t in (tree, jax.tree.map(jnp.zeros_like, tree)):
            eager, _ = tx.update(t, tx.init(t))
            jax.block_until_ready(jax.jit(tx.update)(t, tx.init(t)))
    assert not any(np.any(x) for x in jax.tree.leaves(eager))


@every
def test_no_tracer_leaks(entry):
    """Traced only: while leaks are looked for, JAX keeps nothing that it compiled."""
    tx = entry.make()
    tree = helpers.gradients()
    state = tx.init(tree)
    with jax.checking_leaks():
        traced = jax.jit(tx.update).trace(tree, state)
    assert traced.jaxpr.eqns


@every
def test_one_trace_in_a_thousand_steps(entry):
    tree = helpers.gradients()
    tx = entry.make()
    traces = []

    @jax.jit
    def update(updates, state):
        traces.append(1)
        return tx.update(updates, state)

    state = tx.init(tree)
    updates = tree
    for _ in range(1000):
        updates, state = update(tree, state)
    assert helpers.differs(updates, tree)
    assert int(state.clip_step) == 1000
    assert len(traces) == 1


@every
def test_orbax_round_trip(entry, tmp_path):
    tree = helpers.gradients()
    tx = optax.chain(entry.make(), optax.adam(1e-3))
    _, state = tx.update(tree, tx.init(tree), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(tree))
    helpers.assert_identical(restored, state)
    again, _ = tx.update(tree, restored, tree)
    expected, _ = tx.update(tree, state, tree)
    helpers.assert_identical(again, expected)
