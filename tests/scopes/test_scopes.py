"""Test which leaves, axes and units share a norm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import recipes
from tests.support import helpers


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (0, 2), (-1, 0)])
def test_axes_norms_equal_numpy(axis):
    x = np.float32(np.random.default_rng(0).normal(size=(3, 4, 5)) * 3)
    size = np.sqrt(np.sum(np.float64(x) ** 2, axis=axis, keepdims=True))
    expected = x * np.minimum(1, 4.0 / size)
    found = helpers.quickly_clipped(
        helpers.tx_without_promotion(optclip.clip_by_norm(4.0, axis=axis)), x
    )
    assert np.any(size > 4)
    assert axis not in (0, 1, -1) or np.any(size < 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_axes_take_one_threshold_per_unit():
    tx = optclip.clip_by_norm(np.float32([[1.0, 4.0]]), axis=0)
    found = helpers.quickly_clipped(tx, np.ones((4, 2), np.float32))
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
    found = helpers.quickly_clipped(
        optclip.clip_by_group_norm({"all": 1.0, "rest": None}, labels), tree
    )
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
    clipped = helpers.quickly_clipped(
        optclip.clip_by(1.0, over=Everything(), mask={"w": True, "b": False}), tree
    )
    assert clipped == {"w": 1.0, "b": 4.0}


# Units of AGC: each output of a layer, of any rank, stacked or not.

CLOSE = {"rtol": 1e-5, "atol": 1e-9}
SHAPES = [(), (5,), (4, 5), (3, 4, 5), (2, 3, 4, 5), (2, 2, 2, 3, 4, 5)]


def arrays(shape, rng):
    """Return gradients, every other unit past the threshold, and parameters."""
    grads, params = (np.asarray(rng.normal(size=shape), np.float32) for _ in range(2))
    size = np.resize([1.0, 1e-3], shape[-1:])
    # The parameters of every third unit are zero.
    is_nonzero = np.resize([1.0, 1.0, 0.0], shape[-1:])
    return grads * np.float32(size), params * np.float32(is_nonzero)


def expected_of(grads, params, axis):
    """Equation 3 of Brock et al. (2021) in float64."""
    grads, params = (np.asarray(x, np.float64) for x in (grads, params))
    norm, size = (
        np.sqrt(np.sum(x**2, axis=axis, keepdims=True)) for x in (grads, params)
    )
    limit = 0.01 * np.maximum(size, 1e-3)
    return np.where(norm > limit, grads * limit / np.where(norm > 0, norm, 1), grads)


AGC = recipes.agc()


def test_units_of_every_rank_match_paper():
    rng = np.random.default_rng(0)
    grads, params = zip(*(arrays(shape, rng) for shape in SHAPES), strict=True)
    found = helpers.quickly_clipped(AGC, grads, params)
    for clipped, g, p in zip(found, grads, params, strict=True):
        axis = () if g.ndim == 0 else (0,) if g.ndim == 1 else tuple(range(g.ndim - 1))
        np.testing.assert_allclose(clipped, expected_of(g, p, axis), **CLOSE)
        assert g.ndim == 0 or not np.allclose(clipped, g)


def test_stacked_layers_clip_like_separate_layers():
    shapes = {"kernel": (3, 4, 5), "bias": (3, 5), "scale": (3,)}
    rng = np.random.default_rng(0)
    pairs = {name: arrays(shape, rng) for name, shape in shapes.items()}
    grads, params = ({"net": {k: v[i] for k, v in pairs.items()}} for i in range(2))
    tx = recipes.agc(stacked=lambda path: path.startswith("net"))
    found = helpers.quickly_clipped(tx, grads, params)["net"]
    for name, axis in (("kernel", (1,)), ("bias", (1,)), ("scale", ())):
        expected = expected_of(grads["net"][name], params["net"][name], axis)
        np.testing.assert_allclose(found[name], expected, **CLOSE)
    assert not np.allclose(
        helpers.quickly_clipped(AGC, grads, params)["net"]["bias"], found["bias"]
    )


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_relative_threshold_of_infinite_parameter_norm_clips_nothing(nonfinite):
    """The squares of parameters may overflow, unlike those of gradients."""
    rule = optclip.thresholds.relative_to_params(0.5)
    tx = optclip.clip_by_norm(rule, nonfinite=nonfinite)
    grads = np.float32([6e25, 8e25])
    np.testing.assert_array_equal(
        helpers.quickly_clipped(tx, grads, np.float32([1e25, 1e25])), grads
    )
    np.testing.assert_allclose(
        helpers.quickly_clipped(tx, grads, np.float32([6, 8])), [3.0, 4.0], rtol=1e-6
    )
