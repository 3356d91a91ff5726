"""Test which leaves and axes share a norm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from tests.support import helpers


def clip(tx, tree):
    return helpers.quick_jit(lambda t: tx.update(t, tx.init(t))[0])(tree)


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (0, 2), (-1, 0)])
def test_axes_norms_equal_numpy(axis):
    x = np.float32(np.random.default_rng(0).normal(size=(3, 4, 5)) * 3)
    size = np.sqrt(np.sum(np.float64(x) ** 2, axis=axis, keepdims=True))
    expected = x * np.minimum(1, 4.0 / size)
    found = clip(helpers.tx_without_promotion(optclip.clip_by_norm(4.0, axis=axis)), x)
    assert np.any(size > 4)
    assert axis not in (0, 1, -1) or np.any(size < 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_axes_take_one_threshold_per_unit():
    tx = optclip.clip_by_norm(np.float32([[1.0, 4.0]]), axis=0)
    found = clip(tx, np.ones((4, 2), np.float32))
    np.testing.assert_allclose(found, [[0.5, 1.0]] * 4, rtol=1e-6)


def test_groups_function_gets_plain_leaves_at_init_and_update():
    """Sparse, integer and repeated leaves too; a BCOO of labels labels the BCOO."""
    trees = []

    def labels(tree):
        trees.append(tree)
        return jax.tree.map(lambda x: "all" if x.ndim else "rest", tree)

    w = jnp.array([3.0, 4.0])
    sparse = BCOO((jnp.array([12.0]), jnp.array([[1]])), shape=(5,))
    tree = {"a": w, "b": w, "n": jnp.int32(7), "s": sparse}
    found = clip(optclip.clip_by_group_norm({"all": 1.0, "rest": None}, labels), tree)
    np.testing.assert_allclose(found["s"].data, 12 / np.sqrt(194), rtol=1e-6)
    assert len(trees) > 1
    for each in trees:
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(each))
        assert isinstance(each["s"], BCOO)


LIMITS = {"a": 1.0, "b": lambda step: 2.0 + step, "c": None}


@pytest.mark.parametrize(
    "tx",
    [
        optclip.clip_by_norm(LIMITS),
        optclip.clip_by_group_norm(LIMITS, {"a": "a", "b": "b", "c": "c"}),
    ],
    ids=["leaf", "group"],
)
def test_thresholds_per_leaf_and_group_mix_numbers_schedules_and_none(tx):
    tree = {"a": np.float32([3]), "b": np.float32([4]), "c": np.float32([5])}
    update, state = helpers.quick_jit(tx.update), tx.init(tree)
    for second in (2.0, 3.0):
        found, state = update(tree, state)
        assert [float(found[k][0]) for k in "abc"] == [1.0, second, 5.0]


@dataclasses.dataclass(frozen=True)
class Everything(optclip.scopes.Scope):
    """Return a block for every leaf, also for leaves that a mask excludes."""

    def blocks(self, tree):
        return optclip.norms.Block(jax.tree.leaves(tree))

    def spread(self, values, tree):
        return {"w": values, "b": values}


def test_mask_excludes_leaf_for_which_custom_scope_returns_block():
    tree = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
    mask = {"w": True, "b": False}
    clipped = clip(optclip.clip_by(1.0, over=Everything(), mask=mask), tree)
    assert clipped == {"w": 1.0, "b": 4.0}
