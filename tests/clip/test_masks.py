"""Which leaves enter a norm and which are scaled are two choices."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers

TREE = {"a": jnp.array([3.0]), "b": jnp.array([4.0]), "frozen": jnp.array([1e6])}
BY_PATH = optclip.by_path(lambda path: path != "frozen")
BY_TREE = {"a": True, "b": np.True_, "frozen": False}
masks = pytest.mark.parametrize("mask", [BY_PATH, BY_TREE], ids=["path", "tree"])


@masks
def test_norm_mask_leaves_out_of_the_norm_only(mask, run):
    found, norm = run(lambda t: F.clip_by_global_norm(t, 1.0, norm_mask=mask))(TREE)
    assert norm == 5.0
    np.testing.assert_allclose(found["a"], [0.6], rtol=1e-6)
    np.testing.assert_allclose(found["frozen"], [2e5], rtol=1e-6)


@masks
def test_clip_mask_leaves_out_of_the_scaling_only(mask, run):
    found, norm = run(lambda t: F.clip_by_global_norm(t, 1.0, clip_mask=mask))(TREE)
    np.testing.assert_allclose(norm, 1e6, rtol=1e-6)
    np.testing.assert_allclose(found["a"], [3e-6], rtol=1e-5)
    assert found["frozen"] == 1e6


@masks
def test_mask_leaves_out_altogether(mask, run):
    tx = optclip.clip_by_global_norm(1.0, mask=mask)
    found, state = run(lambda t: tx.update(t, tx.init(t)))(TREE)
    np.testing.assert_allclose(found["b"], [0.8], rtol=1e-6)
    assert found["frozen"] == 1e6
    assert optclip.metrics(state)["clip/norm"] == 5.0


@masks
@pytest.mark.parametrize(
    "clip",
    [
        lambda t, m: F.clip_by_norm(t, 1.0, mask=m),
        lambda t, m: F.clip_by_rms(t, 1.0, mask=m),
        lambda t, m: F.clip_by_average_norm(t, 1.0, mask=m),
        lambda t, m: F.clip_by_value(t, lower=-1.0, upper=1.0, mask=m),
        lambda t, m: F.clip_by_group_norm(t, 1.0, BY_GROUP, mask=m)[0],
        lambda t, m: F.clip_by(t, 1.0, over="leaf", mask=m)[0],
    ],
    ids=["norm", "rms", "average", "value", "group", "any"],
)
def test_every_function_takes_a_mask(mask, clip):
    found = clip(TREE, mask)
    assert found["a"] == found["b"] == 1.0
    assert found["frozen"] == 1e6


BY_GROUP = {"a": "a", "b": "b", "frozen": "c"}


def test_a_leaf_outside_the_norm_is_in_no_group_norm():
    mask = optclip.by_path(lambda path: path != "b")
    groups = {"a": "x", "b": "x", "frozen": "y"}
    found, norms = F.clip_by_group_norm(TREE, 1.0, groups, norm_mask=mask)
    assert norms["x"] == 3.0
    np.testing.assert_allclose(found["b"], [4 / 3], rtol=1e-6)


@pytest.mark.parametrize("name", ["mask", "norm_mask", "clip_mask"])
def test_a_mask_that_takes_no_leaf_is_refused_with_the_paths(name):
    """As of a misspelt path; a tree in which nothing could be clipped has no such."""
    tree = {"body": {"kernel": jnp.ones(2)}, "head": jnp.ones(1), "count": 3}
    misspelt = optclip.by_path(lambda path: "haed" in path or path == "count")
    with pytest.raises(ValueError, match=f"`{name}` must .*'body/kernel', 'head'"):
        F.clip_by_global_norm(tree, 1.0, **{name: misspelt})
    tx = optclip.clip_by_global_norm(1.0, **{name: misspelt})
    with pytest.raises(ValueError, match=f"`{name}` must .*'body/kernel', 'head'"):
        tx.init(tree)
    found, norm = F.clip_by_global_norm({"count": 3}, 1.0, **{name: misspelt})
    assert found == {"count": 3}
    assert norm == 0


def test_masked_leaves_keep_the_bits():
    tree = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1e-40, jnp.nan])}
    mask = {"a": True, "b": False}
    found, _ = F.clip_by_global_norm(tree, 1.0, mask=mask)
    assert helpers.differs(found["a"], tree["a"])
    helpers.assert_identical(found["b"], tree["b"])


def test_clips_that_share_a_mask_may_be_shown_none_of_its_leaves():
    """`optax.partition` shows each clip some of the leaves: that is no slip in a path."""
    mask = optclip.by_path(lambda path: path == "a")
    clips = {c: optclip.clip_by_global_norm(float(c), mask=mask) for c in "12"}
    tx = optax.partition(clips, {"a": "1", "b": "2", "frozen": "2"})
    found, _ = tx.update(TREE, tx.init(TREE))
    np.testing.assert_allclose(found["a"], [1.0])
    helpers.assert_identical(found["b"], TREE["b"])
