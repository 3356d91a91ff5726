"""What each policy makes of NaN and inf: the table of the docs, cell by cell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from tests import helpers

BAD = [jnp.nan, jnp.inf, -jnp.inf]
bad_values = pytest.mark.parametrize("bad", BAD, ids=["nan", "inf", "-inf"])


def tree_with(bad):
    return {"sick": jnp.array([bad, 6.0]), "well": jnp.array([8.0])}


def by_global_norm(tree, policy, c=1.0):
    return F.clip_by_global_norm(tree, c, nonfinite=policy)[0]


def by_norm(tree, policy, c=1.0):
    return F.clip_by_norm(tree, c, nonfinite=policy)


def by_value(tree, policy, c=1.0):
    return F.clip_by_value(tree, -c, c, nonfinite=policy)


@bad_values
def test_propagate(bad, run):
    """All that share the norm become NaN; a value clip sends inf to the bound."""
    tree = tree_with(bad)
    found = run(lambda t: by_global_norm(t, "propagate"))(tree)
    assert np.all(np.isnan(found["sick"]))
    assert np.all(np.isnan(found["well"]))
    found = run(lambda t: by_norm(t, "propagate"))(tree)
    assert np.all(np.isnan(found["sick"]))
    assert found["well"] == 1.0
    found = run(lambda t: by_value(t, "propagate"))(tree)
    first = np.clip(bad, -1, 1)
    np.testing.assert_array_equal(found["sick"], [first, 1.0])


@bad_values
def test_zero(bad, run):
    """All that share the norm become zero."""
    tree = tree_with(bad)
    found = run(lambda t: by_global_norm(t, "zero"))(tree)
    assert not np.any(found["sick"])
    assert not np.any(found["well"])
    found = run(lambda t: by_norm(t, "zero"))(tree)
    assert not np.any(found["sick"])
    assert found["well"] == 1.0
    found = run(lambda t: by_value(t, "zero"))(tree)
    np.testing.assert_array_equal(found["sick"], [0.0, 1.0])


@bad_values
def test_drop(bad, run):
    """The bad entry becomes zero, the rest is measured and clipped."""
    tree = tree_with(bad)
    found = run(lambda t: by_global_norm(t, "drop"))(tree)
    np.testing.assert_allclose(found["sick"], [0.0, 0.6], rtol=1e-6)
    np.testing.assert_allclose(found["well"], [0.8], rtol=1e-6)
    found = run(lambda t: by_norm(t, "drop"))(tree)
    np.testing.assert_allclose(found["sick"], [0.0, 1.0], rtol=1e-6)
    found = run(lambda t: by_value(t, "drop"))(tree)
    np.testing.assert_array_equal(found["sick"], [0.0, 1.0])
    # Below the threshold the entry is dropped all the same.
    found = run(lambda t: by_global_norm(t, "drop", 100.0))(tree)
    np.testing.assert_array_equal(found["sick"], [0.0, 6.0])


@bad_values
@pytest.mark.parametrize("clip", [by_global_norm, by_norm, by_value])
def test_raise(bad, clip):
    """Under checkify an error that names the leaf; otherwise as propagate."""
    checked = checkify.checkify(jax.jit(lambda t: clip(t, "raise")))
    error, _ = checked(tree_with(bad))
    with pytest.raises(
        checkify.JaxRuntimeError, match="leaf 'sick'.*nonfinite='raise'"
    ):
        error.throw()
    error, found = checked(tree_with(0.0))
    assert error.get() is None
    assert helpers.differs(found, tree_with(0.0))
    plain = jax.jit(lambda t: clip(t, "raise"))(tree_with(bad))
    expected = clip(tree_with(bad), "propagate")
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_raise_sees_leaves_that_are_only_measured_but_no_padding():
    mask = {"sick": False, "well": True}

    def clip(tree):
        return F.clip_by_global_norm(tree, 1.0, nonfinite="raise", clip_mask=mask)[0]

    error, _ = checkify.checkify(clip)(tree_with(jnp.nan))
    assert "leaf 'sick'" in error.get()
    padded = BCOO((jnp.array([4.0, jnp.nan]), jnp.array([[1], [9]])), shape=(4,))
    error, found = checkify.checkify(lambda m: by_norm(m, "raise"))(padded)
    assert error.get() is None
    np.testing.assert_array_equal(found.todense(), [0, 1, 0, 0])


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop", "raise"])
@pytest.mark.parametrize("clip", [by_global_norm, by_norm, by_value])
def test_an_infinite_threshold_touches_nothing_under_any_policy(policy, clip):
    tree = tree_with(jnp.nan) | {"more": jnp.array([jnp.inf, -0.0, 1e-40])}
    helpers.assert_identical(clip(tree, policy, jnp.inf), tree)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_nan_in_a_leaf_outside_the_norm(policy, run):
    """It is not seen by the norm, so the others are clipped as if it were not there."""
    mask = {"sick": False, "well": True}

    def clip(tree):
        return F.clip_by_global_norm(tree, 1.0, norm_mask=mask, nonfinite=policy)[0]

    found = run(clip)(tree_with(jnp.nan))
    assert found["well"] == 1.0
    first = 0.0 if policy == "drop" else np.nan
    np.testing.assert_array_equal(found["sick"], [first, 0.75])


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_nan_in_a_sparse_leaf(policy, run):
    rows = jnp.array([[1], [2], [1]])
    mat = BCOO((jnp.array([6.0, 8.0, jnp.nan]), rows), shape=(4,))
    found = run(lambda m: by_global_norm(m, policy))(mat).todense()
    expected = {
        "propagate": [0, np.nan, np.nan, 0],
        "zero": [0, 0, 0, 0],
        "drop": [0, 0.6, 0.8, 0],
    }[policy]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_all_nan(policy, run):
    tree = {"a": jnp.full(3, jnp.nan), "b": jnp.full(2, jnp.inf)}
    found = run(lambda t: by_global_norm(t, policy))(tree)
    for leaf in jax.tree.leaves(found):
        assert np.all(np.isnan(leaf) if policy == "propagate" else leaf == 0)


def test_a_norm_in_hand_that_is_not_finite():
    found, norm = F.clip_by_global_norm(jnp.ones(2), 1.0, norm=jnp.inf)
    assert np.all(np.isnan(found))
    assert norm == np.inf
    found, _ = F.clip_by_global_norm(jnp.ones(2), 1.0, norm=jnp.nan, nonfinite="zero")
    assert not np.any(found)


@bad_values
def test_memory_keeps_out_what_is_not_finite(bad):
    """A rule that saw a NaN or inf remembers what it knew before."""
    from tests.registry import LargestSoFar

    tx = optclip.clip_by_global_norm(LargestSoFar(), nonfinite="zero")
    good = jnp.array([3.0, 4.0])
    state = tx.init(good)
    for tree in (good, jnp.array([bad, 1.0]), good):
        found, state = tx.update(tree, state)
    np.testing.assert_allclose(found, [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(state.clip_memory), [5.0])
