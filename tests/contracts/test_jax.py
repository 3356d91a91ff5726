"""Every transformation under every transformation of JAX.

All entries are traced and compiled; the other transformations take entries of each
scope or of each response.
The tests share one compiled `update` per entry, on leaves of three dtypes. The scope of
the parameter puts the tests of one entry in a row, so that one worker runs them.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import helpers
from tests.support.helpers import quick_jit
from tests.support.registry import ENTRIES, by_trait

every, each_response, each_scope = (
    pytest.mark.parametrize(
        "entry", entries, ids=lambda entry: entry.id, scope="module"
    )
    for entries in (
        ENTRIES,
        by_trait(ENTRIES, "response", "state"),
        by_trait(ENTRIES, "scope", "state"),
    )
)
TREE = helpers.mixed_gradients()
OTHER = helpers.mixed_gradients(1)
ZEROS = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), TREE)


def compiled_update(entry):
    """`update`, donated its arguments, which fails if JAX traces it twice from now on.

    A worker may have cleared JAX's caches, after tests of another module.
    """
    chex.clear_trace_counter()
    return _compiled_update(entry)


@functools.cache
def _compiled_update(entry):
    update = chex.assert_max_traces(
        helpers.tx_without_promotion(entry.make()).update, n=1
    )
    return quick_jit(update, donate_argnums=(0, 1))


def fresh(tree=TREE):
    """A copy of the tree that may be donated."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x)), tree)


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@every
def test_state_types_do_not_depend_on_values_or_step(entry):
    """`init` reads shapes and dtypes; `update` keeps the types."""
    tx = helpers.tx_without_promotion(entry.make())
    state = tx.init(TREE)
    chex.assert_tree_has_only_ndarrays(state)
    shapes = jax.eval_shape(lambda: TREE)
    helpers.assert_same_types(tx.init(shapes), state)
    helpers.assert_same_types(jax.eval_shape(tx.init, shapes), state)
    # The parameters may have another dtype than the gradients.
    state = jax.eval_shape(tx.init, helpers.gradients(dtype=jnp.bfloat16))
    helpers.assert_same_types(jax.eval_shape(tx.update, TREE, state), (TREE, state))


@each_scope
def test_update_leaks_no_tracer(entry):
    tx = helpers.tx_without_promotion(entry.make())
    # One leaf, since the check for leaks traces each operation of JAX again.
    leaf = TREE["out"]
    state = jax.eval_shape(tx.init, leaf)
    with jax.checking_leaks():
        jax.eval_shape(tx.update, leaf, state)


@each_response
def test_eager_update_equals_compiled_and_compiles_once(entry):
    """Under `debug_nans`: a zero gradient divides by zero in no branch."""
    tx = helpers.tx_without_promotion(entry.make())
    with jax.debug_nans(True):
        found, state = tx.update(TREE, tx.init(TREE))
        with helpers.compilations() as compilations:
            updates, _ = tx.update(OTHER, state)
            zeros, _ = tx.update(ZEROS, tx.init(ZEROS))
    assert not compilations
    assert helpers.differs(updates, OTHER)
    chex.assert_trees_all_equal(zeros, ZEROS)
    helpers.assert_close(found, entry.expected(helpers.as_float64(TREE)), ulps=4)
    _, compiled_state = compiled_update(entry)(fresh(), tx.init(TREE))
    helpers.assert_close(state, compiled_state, ulps=8)


@every
def test_compiled_update_works_in_place_without_host_or_retrace(entry):
    update, tree = compiled_update(entry), fresh()
    # One entry takes a thousand steps; the others differ in no step after the second.
    steps = 1000 if entry is ENTRIES[0] else 3
    state = entry.make().init(tree)
    text = update.lower(tree, state).as_text()
    assert not re.search(r"callback|infeed|outfeed|\.send|\.recv", text)
    with jax.transfer_guard("disallow"):
        updates, state = update(tree, state)
        assert all(x.is_deleted() for x in jax.tree.leaves(tree))
        clipped = jax.device_get(updates)
        for _ in range(steps - 1):
            updates, state = update(updates, state)
    assert int(state.clip_step) == steps
    assert helpers.differs(clipped, TREE)
    helpers.assert_close(clipped, entry.expected(helpers.as_float64(TREE)))


@each_scope
def test_vmap_clips_each_example_by_its_own_norm_and_threshold(entry):
    trees = [helpers.mixed_gradients(seed) for seed in range(3)]

    def clip(tree, threshold=None):
        tx = helpers.tx_without_promotion(entry.make(threshold))
        return tx.update(tree, tx.init(tree))[0]

    c = entry.threshold[1]
    thresholds = np.float32([c, 0.5 * c, 0.25 * c] if entry.scalar_threshold else [])

    @quick_jit
    def both(trees, thresholds):
        by_tree = jax.vmap(clip)(trees)
        if not entry.scalar_threshold:
            return (by_tree,)
        return by_tree, jax.vmap(lambda c: clip(TREE, c))(thresholds)

    found = both(stack(trees), thresholds)
    expected = (
        [entry.expected(helpers.as_float64(tree)) for tree in trees],
        [entry.expected(helpers.as_float64(TREE), float(c)) for c in thresholds],
    )
    assert helpers.differs(found[0], stack(trees))
    for clipped, each in zip(found, expected, strict=False):
        helpers.assert_close(clipped, stack(each))
