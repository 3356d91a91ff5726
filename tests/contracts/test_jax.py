"""Every transformation under every transformation of JAX."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests.support import helpers
from tests.support.helpers import quick_jit
from tests.support.registry import ENTRIES, SCALAR, numpy_tree

every = pytest.mark.covering(entry=ENTRIES, kind=helpers.KINDS)
scalar = pytest.mark.covering(entry=SCALAR, kind=helpers.KINDS)


def clip(tx, tree):
    updates, _ = tx.update(tree, tx.init(tree))
    return updates


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.covering(entry=ENTRIES)
def test_jit_is_eager(entry):
    tree = helpers.mixed_gradients()
    tx = helpers.strict(entry.make())
    eager, eager_state = tx.update(tree, tx.init(tree))
    jitted, jitted_state = quick_jit(tx.update)(tree, tx.init(tree))
    assert helpers.differs(eager, tree)
    helpers.assert_close(jitted, eager, ulps=4)
    helpers.assert_close(jitted_state, eager_state, ulps=8)


@every
def test_loops_and_branches_take_the_state(entry, kind):
    """The state has one structure, shape and dtype for ever, so all loops take it."""
    tree = helpers.typed(kind)
    tx = helpers.strict(entry.make())

    def step(carry, _=None):
        state, _ = carry
        updates, state = tx.update(tree, state)
        return (state, updates), None

    def scanned(carry):
        return jax.lax.scan(step, carry, None, length=5)[0]

    def looped(carry):
        return jax.lax.while_loop(
            lambda carry: carry[0].clip_step < 5, lambda carry: step(carry)[0], carry
        )

    def branched(carry):
        return jax.lax.cond(carry[0].clip_step > 0, scanned, looped, carry)

    state, last = quick_jit(branched)((tx.init(tree), tree))
    assert int(state.clip_step) == 5
    assert helpers.differs(last, tree)
    helpers.assert_same_types((state, last), (tx.init(tree), tree))
    again, last = quick_jit(branched)((state, tree))
    assert int(again.clip_step) == 10
    assert helpers.differs(last, tree)


@every
def test_state_is_stable(entry, kind):
    """Also where the gradients have other dtypes than the parameters."""
    tx = helpers.strict(entry.make())
    state = jax.eval_shape(tx.init, helpers.typed("bfloat16"))
    _, after = jax.eval_shape(tx.update, helpers.typed(kind), state)
    helpers.assert_same_types(after, state)
    chex.assert_tree_has_only_ndarrays(tx.init(helpers.typed(kind)))


@every
def test_init_looks_at_shapes_and_dtypes_only(entry, kind):
    """`init` looks at shapes and dtypes only."""
    tree = helpers.typed(kind)
    tx = helpers.strict(entry.make())
    shapes = jax.eval_shape(lambda: tree)
    state = tx.init(tree)
    helpers.assert_same_types(jax.eval_shape(tx.init, shapes), state)
    helpers.assert_same_types(tx.init(shapes), state)


@every
def test_vmap_clips_each_example_by_itself(entry, kind):
    """Per-example clipping: each of a batch by its own norms."""
    trees = [helpers.typed(kind, seed) for seed in range(3)]
    tx = helpers.strict(entry.make())
    found = quick_jit(jax.vmap(lambda t: clip(tx, t)))(stack(trees))
    assert helpers.differs(found, stack(trees))
    expected = [entry.expected(numpy_tree(t)) for t in trees]
    helpers.assert_close(found, jax.tree.map(lambda *x: np.stack(x), *expected))


@scalar
def test_thresholds_may_be_vmapped(entry, kind):
    tree = helpers.typed(kind)
    c = entry.threshold[1]
    values = jnp.array([c, 0.5 * c, 0.25 * c])
    clips = jax.vmap(lambda t: clip(helpers.strict(entry.make(t)), tree))
    found = quick_jit(clips)(values)
    expected = [entry.expected(numpy_tree(tree), float(v)) for v in values]
    helpers.assert_close(found, jax.tree.map(lambda *x: np.stack(x), *expected))


@every
def test_gradients_and_state_may_be_donated(entry, kind):
    """Gradients and state may be donated: the clip works in place."""
    tree = helpers.typed(kind)
    expected = entry.expected(numpy_tree(tree))
    assert helpers.differs(expected, tree)
    tx = entry.make()
    update = quick_jit(tx.update, donate_argnums=(0, 1))
    found, _ = update(tree, tx.init(tree))
    helpers.assert_close(found, expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))


@every
def test_nothing_is_sent_to_the_host(entry, kind):
    tree = helpers.typed(kind)
    tx = entry.make()
    state = tx.init(tree)
    update = quick_jit(tx.update).lower(tree, state).compile()
    with jax.transfer_guard("disallow"):
        found, _ = jax.block_until_ready(update(tree, state))
    assert helpers.differs(found, tree)
    text = update.as_text()
    assert not re.search(r"callback|infeed|outfeed| send\(| recv\(", text)


@every
def test_debug_nans_finds_nothing(entry, kind):
    """Nothing hidden in a branch not taken is NaN: zeros, op by op."""
    tx = entry.make()
    tree = helpers.typed(kind)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    with jax.debug_nans(True):
        found, _ = tx.update(zeros, tx.init(zeros))
        clipped, _ = tx.update(tree, tx.init(tree))
    chex.assert_trees_all_equal(found, zeros)
    assert helpers.differs(clipped, tree)


@pytest.mark.covering(entry=ENTRIES)
def test_no_tracer_leaks(entry):
    """Traced only: while leaks are looked for, JAX keeps nothing that it compiled."""
    tx = entry.make()
    tree = helpers.mixed_gradients()
    state = tx.init(tree)
    with jax.checking_leaks():
        traced = jax.jit(tx.update).trace(tree, state)
    assert traced.jaxpr.eqns


@every
def test_one_trace_in_a_thousand_steps(entry, kind):
    tree = helpers.typed(kind)
    tx = entry.make()
    chex.clear_trace_counter()
    update = quick_jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(tree)
    for _ in range(1000):
        updates, state = update(tree, state)
    assert helpers.differs(updates, tree)
    assert int(state.clip_step) == 1000


@pytest.mark.covering(entry=ENTRIES)
def test_update_called_again_outside_jit_compiles_nothing(entry):
    first, second = helpers.mixed_gradients(0), helpers.mixed_gradients(1)
    tx = entry.make()
    _, state = tx.update(first, tx.init(first))
    with helpers.compilations() as found:
        updates, _ = tx.update(second, state)
    assert not found
    assert helpers.differs(updates, second)


@pytest.mark.covering(entry=ENTRIES)
def test_orbax_restores_the_state(entry, tmp_path):
    """A restored state is the saved one, and goes on as it would have."""
    tree = helpers.mixed_gradients()
    tx = optax.chain(entry.make(), optax.scale(-1.0))
    update = quick_jit(tx.update)
    _, state = update(tree, tx.init(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(tree))
    helpers.assert_identical(restored, state)
    helpers.assert_identical(update(tree, restored), update(tree, state))
