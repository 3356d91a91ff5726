"""Masks, labels and thresholds of a tree: prefixes, or functions of a path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F

TREE = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
MASKS = ["mask", "norm_mask", "clip_mask"]


def test_mask_prefix_covers_sparse_leaves_and_none():
    mat = BCOO((jnp.array([3.0]), jnp.array([[1]])), shape=(4,))
    tree = {"x": [mat, jnp.array([4.0])], "y": None, "z": jnp.array([9.0])}
    mask = {"x": True, "y": True, "z": False}
    assert F.global_norm(tree, mask=mask) == 5.0
    by_map = jax.tree.map(lambda _: True, tree)
    np.testing.assert_allclose(F.global_norm(tree, mask=by_map), np.sqrt(106))


def test_by_path_joins_keys_with_slashes():
    paths = []
    tree = {"enc": [{"w": 1.0}, {"w": 2.0}], "none": None}
    mask = optclip.by_path(lambda path: paths.append(path) or True)(tree)
    assert paths == ["enc/0/w", "enc/1/w"]
    assert mask == {"enc": [{"w": True}, {"w": True}], "none": None}


@pytest.mark.parametrize("name", MASKS)
def test_function_of_path_without_by_path_raises(name):
    """It would be called with the whole tree, and mask or label all of it alike."""
    with pytest.raises(TypeError, match=f"`{name}` must return .*optclip.by_path"):
        F.clip_by_global_norm(TREE, 1.0, **{name: lambda path: "kernel" in path})
    with pytest.raises(TypeError, match=f"`{name}` failed.*endswith.*by_path"):
        F.clip_by_global_norm(TREE, 1.0, **{name: lambda path: path.endswith("s")})
    with pytest.raises(TypeError, match="`groups` must return .*optclip.by_path"):
        F.clip_by_group_norm(TREE, 1.0, lambda path: "x" if "a" in path else "y")


@pytest.mark.parametrize("name", MASKS)
def test_mask_one_bool_for_many_leaves_raises(name):
    """`inject_hyperparams` makes one of a function, which it calls with the step."""
    words = rf"`{name}` must be .*False.*static_args"
    with pytest.raises(TypeError, match=words):
        F.clip_by_global_norm(TREE, 1.0, **{name: False})

    def matrices(tree):
        return jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)

    factory = optax.inject_hyperparams(optclip.clip_by_global_norm)
    tx = factory(1.0, **{name: matrices})
    with pytest.raises(TypeError, match=words):
        tx.update(TREE, tx.init(TREE))
    with pytest.raises(ValueError, match=f"`{name}` must be True.*single leaf"):
        F.clip_by_global_norm(TREE["bias"], 1.0, **{name: False})


def test_threshold_tree_for_one_norm_raises():
    with pytest.raises(ValueError, match=r"max_norm.*one norm here.*clip_by_norm"):
        F.clip_by_global_norm(TREE, {"kernel": 1.0, "bias": 2.0})
