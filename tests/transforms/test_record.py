"""What the state of a clip says of its last step, and counts of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from optclip.norms import Block
from optclip.typing import ClipState
from tests.support import helpers
from tests.support.registry import ENTRIES


def after(tx, *trees):
    update, state = helpers.quick_jit(tx.update), tx.init(trees[0])
    for tree in trees:
        _, state = update(tree, state, tree)
    return state


@pytest.mark.parametrize("record", [True, "leaves"])
def test_before_the_first_step_nothing_was_clipped(record):
    state = optclip.clip_by_norm(1.0, record=record).init({"a": jnp.ones(2)})
    for key, number in optclip.metrics(state).items():
        assert number == ("coefficient" in key), key


def test_the_record_of_a_rule_is_by_its_threshold():
    """The median of 1 and 3 is 2."""
    tx = optclip.clip_by_norm(thresholds.quantile(0.5, window=2))
    found = optclip.metrics(after(tx, jnp.array([1.0]), jnp.array([3.0])))
    assert found["clip/threshold"] == 2
    np.testing.assert_allclose(found["clip/coefficient"], 2 / 3, rtol=1e-6)
    assert found["clip/rate"] == 0.5


def test_rate_and_nonfinite_count_steps():
    big, small = jnp.array([3.0, 4.0]), jnp.array([0.3, 0.4])
    bad, worse = jnp.array([jnp.nan, 1.0]), jnp.array([jnp.inf, 1.0])
    for policy in ("propagate", "zero", "drop"):
        tx = optclip.clip_by_global_norm(2.0, nonfinite=policy)
        found = optclip.metrics(after(tx, big, small, bad, big, worse, small))
        assert found["clip/nonfinite"] == 2, policy
        np.testing.assert_allclose(found["clip/rate"], 2 / 6, rtol=1e-6)


def test_a_zeroed_step_has_coefficient_zero_and_is_not_a_clipped_one():
    tx = optclip.clip_by_global_norm(2.0, nonfinite="zero")
    found = optclip.metrics(after(tx, jnp.array([jnp.nan, 1.0])))
    assert found["clip/coefficient"] == 0.0
    assert found["clip/rate"] == 0.0
    assert found["clip/nonfinite"] == 1


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_record_false_is_lean_and_clips_the_same(entry):
    tree = helpers.gradients()

    @helpers.quick_jit
    def both(tree):
        pair = entry.make(), entry.make(record=False)
        return [tx.update(tree, tx.init(tree)) for tx in pair]

    (expected, state), (found, lean_state) = both(tree)
    assert helpers.differs(found, tree)
    helpers.assert_identical(found, expected)
    assert len(jax.tree.leaves(lean_state)) < len(jax.tree.leaves(state))
    kept = jax.tree.leaves(lean_state, is_leaf=lambda x: isinstance(x, ClipState))
    assert all(x.clip_record == {} for x in kept if isinstance(x, ClipState))


def test_a_model_of_more_elements_than_an_int32_counts():
    """Traced only: three bfloat16 leaves of 2**30 elements."""
    tree = {key: jax.ShapeDtypeStruct((2**30,), jnp.bfloat16) for key in "abc"}
    for tx in (optclip.clip_by_value(1.0), optclip.clip_by_norm(1.0, axis=())):
        state = jax.eval_shape(tx.init, tree)
        out, _ = jax.eval_shape(tx.update, tree, state, tree)
        helpers.assert_same_types(out, tree)


def test_counts_stay_at_the_largest_number():
    tx = optclip.clip_by_global_norm(1.0, nonfinite="zero")
    last = jnp.int32(2**31 - 1)
    for updates, field in ((3.0, "clip_clipped"), (jnp.nan, "clip_nonfinite")):
        state = tx.init(jnp.zeros(2))
        record = state.clip_record["clip"]._replace(**{field: last})
        state = state._replace(clip_record={"clip": record})
        _, state = tx.update(jnp.full(2, updates), state)
        assert getattr(state.clip_record["clip"], field) == last


def by_hand(tree, axis, limit):
    """The record of a clip of slices or, for (), of elements, in float64."""
    wide = [np.asarray(x, np.float64) for x in tree]
    norms = [np.ravel(np.sqrt(np.sum(x**2, axis)) if axis else np.abs(x)) for x in wide]
    norms = np.concatenate(norms)
    return {
        "clip/norm": norms.max(),
        "clip/threshold": limit,
        "clip/coefficient": np.min(limit / np.maximum(norms, limit)),
        "clip/fraction": np.mean(norms > limit),
    }


@pytest.mark.parametrize("axis", [(), (0,), (1,)])
def test_slices_and_elements_of_small_and_large_leaves_are_one_record(axis, run):
    """Of a large leaf, 70,000 of either, they are looked through by themselves."""
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (70_000, 2), (3, 4), (1, 70_000)]
    tree = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    make = optclip.clip_by_value if not axis else optclip.clip_by_norm
    tx = make(1.5, **({"axis": axis} if axis else {}))
    found = run(lambda tree: optclip.metrics(tx.update(tree, tx.init(tree))[1]))(tree)
    for key, value in by_hand(tree, axis, 1.5).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)


@pytest.mark.parametrize("shape", [(70_000,), (70, 1000), (7, 100, 100)])
def test_the_derivative_of_the_record_of_many_elements_is_that_of_the_largest(shape):
    """Of none is there a NaN."""
    tx = optclip.clip_by_value(1.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    def norm(x):
        return optclip.metrics(tx.update(x, tx.init(x))[1])["clip/norm"]

    slope = np.asarray(jax.grad(norm)(x))
    at = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    assert slope[at] == np.sign(x[at])
    assert np.count_nonzero(slope) == 1


def test_elements_of_two_dtypes_are_one_record():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        tree = [jnp.asarray(rng.normal(size=80_000), d) for d in ("float32", "float64")]
        for tx in (
            optclip.clip_by_value(1.5),
            optclip.clip_by_value(lower=-1, upper=2),
        ):
            found = optclip.metrics(tx.update(tree, tx.init(tree))[1])
            largest = max(float(jnp.max(jnp.abs(x))) for x in tree)
            np.testing.assert_allclose(found["clip/norm"], largest, rtol=1e-6)
            assert 0.1 < found["clip/fraction"] < 0.3


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


def test_a_nan_threshold_is_recorded_as_such():
    tx = optclip.clip_by_global_norm(lambda step: jnp.nan)
    _, state = tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))
    assert np.isnan(optclip.metrics(state)["clip/coefficient"])


def test_the_record_of_a_scope_of_ones_own_is_of_all_its_norms():
    class Halves(optclip.scopes.Scope):
        def blocks(self, tree):
            return [Block([tree[0]]), Block([tree[1]])]

        def spread(self, values, tree):
            return list(values)

    tx = optclip.clip_by(1.0, over=Halves())
    updates = [jnp.array([3.0]), jnp.array([4.0])]
    _, state = tx.update(updates, tx.init(updates))
    assert optclip.metrics(state)["clip/norm"] == 4.0


def test_an_infinite_coefficient_is_applied_as_recorded(run):
    tx = optclip.clip_by(1.0, response=lambda norm, limit: norm * jnp.inf)
    updates = [jnp.array([3.0, -4.0]), jnp.ones(2)]
    clipped, state = run(tx.update)(updates, tx.init(updates))
    np.testing.assert_array_equal(clipped[0], [np.inf, -np.inf])
    np.testing.assert_array_equal(clipped[1], [np.inf, np.inf])
    assert optclip.metrics(state)["clip/coefficient"] == np.inf
