"""Masks choose separately which leaves enter a norm and which are scaled."""

import functools

import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers

TREE = {
    "a": np.array([3.0], np.float32),
    "b": np.array([4.0], np.float32),
    "frozen": np.array([1e6], np.float32),
}
BY_PATH = optclip.by_path(lambda path: path != "frozen")
BY_TREE = {"a": True, "b": np.True_, "frozen": False}
GROUPS = {"a": "a", "b": "b", "frozen": "c"}
masks = pytest.mark.parametrize("mask", [BY_PATH, BY_TREE], ids=["path", "tree"])


@masks
@pytest.mark.parametrize(
    ("name", "norm", "expected"),
    [
        ("norm_mask", 5.0, {"a": 0.6, "b": 0.8, "frozen": 2e5}),
        ("clip_mask", 1e6, {"a": 3e-6, "b": 4e-6, "frozen": 1e6}),
        ("mask", 5.0, {"a": 0.6, "b": 0.8, "frozen": 1e6}),
    ],
)
def test_mask_excludes_leaf_from_norm_or_scaling(mask, name, norm, expected):
    tx = optclip.clip_by(1.0, **{name: mask})
    clipped, state = helpers.quick_jit(lambda t: tx.update(t, tx.init(t)))(TREE)
    np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], norm, rtol=1e-6)
    for key, value in expected.items():
        np.testing.assert_allclose(clipped[key], [value], rtol=1e-6)


CLIPS = {
    "norm": functools.partial(F.clip_by_norm, max_norm=1.0),
    "rms": functools.partial(F.clip_by_rms, max_rms=1.0),
    "average": functools.partial(F.clip_by_average_norm, max_norm=1.0),
    "value": functools.partial(F.clip_by_value, limit=1.0),
    "group": lambda t, mask: F.clip_by_group_norm(t, 1.0, GROUPS, mask=mask)[0],
    "any": lambda t, mask: F.clip_by(t, 1.0, over="leaf", mask=mask)[0],
}


@pytest.mark.parametrize("name", CLIPS)
def test_pure_functions_apply_mask_and_keep_every_bit_of_other_leaves(name):
    clip = helpers.quick_jit(
        lambda t: [CLIPS[name](t, mask=m) for m in (BY_PATH, BY_TREE)]
    )
    tree = TREE | {"frozen": np.float32([1e6, 1e-40, np.nan])}
    for clipped in clip(tree):
        assert clipped["a"] == clipped["b"] == 1.0
        helpers.assert_identical(clipped["frozen"], tree["frozen"])


def test_norm_mask_excludes_leaf_from_group_norm():
    mask = optclip.by_path(lambda path: path != "b")
    groups = optclip.groups({"a": "x", "b": "x", "frozen": "y"})
    tx = optclip.clip_by(1.0, over=groups, norm_mask=mask)
    clipped, state = tx.update(TREE, tx.init(TREE))
    assert optclip.metrics(state)["clip/norm/x"] == 3.0
    np.testing.assert_allclose(clipped["b"], [4 / 3], rtol=1e-6)


@pytest.mark.parametrize("over", ["leaf", optclip.singular_values()])
def test_clip_mask_excludes_leaf_from_coefficients(over):
    tx = optclip.clip_by(1.0, over=over, clip_mask=BY_PATH, record="leaves")
    clipped, state = tx.update(TREE, tx.init(TREE))
    metrics = optclip.metrics(state)
    assert clipped["frozen"] == 1e6
    rates = {key: metrics[f"clip/rate/{key}"] for key in TREE}
    assert rates == {"a": 1, "b": 1, "frozen": 0}
    assert metrics["clip/coefficient/frozen"] == 1


@pytest.mark.parametrize("name", ["mask", "norm_mask", "clip_mask"])
def test_mask_without_leaves_raises_with_paths(name):
    """A misspelled path selects no leaf; without float leaves no mask can."""
    ones = np.ones(2, np.float32)
    tree = {"body": {"kernel": ones}, "head": ones, "count": 3}
    misspelt = optclip.by_path(lambda path: "haed" in path or path == "count")
    tx = optclip.clip_by(1.0, **{name: misspelt})
    with pytest.raises(ValueError, match=f"`{name}` must .*'body/kernel', 'head'"):
        tx.init(tree)
    clipped, state = tx.update({"count": 3}, tx.init({"count": 3}))
    assert (clipped, optclip.metrics(state)["clip/norm"]) == ({"count": 3}, 0)


def test_mask_in_partition_may_match_none_of_its_leaves():
    """`optax.partition` passes each clipping transformation some of the leaves."""
    mask = optclip.by_path(lambda path: path == "a")
    clips = {c: optclip.clip_by_global_norm(float(c), mask=mask) for c in "12"}
    tx = optax.partition(clips, {"a": "1", "b": "2", "frozen": "2"})
    clipped, _ = helpers.quick_jit(lambda t: tx.update(t, tx.init(t)))(TREE)
    np.testing.assert_allclose(clipped["a"], [1.0])
    helpers.assert_identical(clipped["b"], TREE["b"])
