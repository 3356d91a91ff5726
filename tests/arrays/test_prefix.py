"""What is given for a tree: masks, labels and thresholds, as prefixes or by path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F

TREE = {"a": jnp.array([3.0]), "b": jnp.array([4.0]), "frozen": jnp.array([1e6])}


TWO = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}


def test_masks_are_prefixes_and_cover_sparse_and_none():
    mat = BCOO((jnp.array([3.0]), jnp.array([[1]])), shape=(4,))
    tree = {"x": [mat, jnp.array([4.0])], "y": None, "z": jnp.array([9.0])}
    mask = {"x": True, "y": True, "z": False}
    assert F.global_norm(tree, mask=mask) == 5.0
    by_map = jax.tree.map(lambda _: True, tree)
    np.testing.assert_allclose(F.global_norm(tree, mask=by_map), np.sqrt(106))


def test_by_path_sees_the_paths_a_person_would_type():
    seen = []
    tree = {"enc": [{"w": 1.0}, {"w": 2.0}], "none": None}
    found = optclip.by_path(lambda path: seen.append(path) or True)(tree)
    assert seen == ["enc/0/w", "enc/1/w"]
    assert found == {"enc": [{"w": True}, {"w": True}], "none": None}


def test_a_path_function_without_by_path_is_caught():
    """It would see the whole tree, and mask or label it with one value."""
    for name in ("mask", "norm_mask", "clip_mask"):
        with pytest.raises(TypeError, match=f"`{name}` must return .*optclip.by_path"):
            F.clip_by_global_norm(TREE, 1.0, **{name: lambda path: "a" in path})
    with pytest.raises(TypeError, match="`groups` must return .*optclip.by_path"):
        F.clip_by_group_norm(TREE, 1.0, lambda path: "x" if "a" in path else "y")


@pytest.mark.parametrize("argument", ["mask", "norm_mask", "clip_mask"])
def test_one_bool_is_no_mask_of_many_leaves(argument):
    """As it arrives where inject_hyperparams has called the function with the step."""
    with pytest.raises(TypeError, match=rf"`{argument}` must be .*False.*static_args"):
        F.clip_by_global_norm(TWO, 1.0, **{argument: False})

    def matrices(tree):
        return jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)

    tx = optax.inject_hyperparams(optclip.clip_by_global_norm)(
        1.0, **{argument: matrices}
    )
    with pytest.raises(TypeError, match=rf"`{argument}` must be .*False.*static_args"):
        tx.update(TWO, tx.init(TWO))
    with pytest.raises(ValueError, match=f"`{argument}` must be True.*single leaf"):
        F.clip_by_global_norm(jnp.ones(3), 1.0, **{argument: False})


def test_a_function_of_a_path_is_recognized():
    with pytest.raises(TypeError, match=r"`mask` failed.*endswith.*by_path"):
        F.clip_by_global_norm(TWO, 1.0, mask=lambda path: path.endswith("s"))


def test_one_norm_takes_one_number():
    with pytest.raises(ValueError, match=r"max_norm.*one norm here.*clip_by_norm"):
        F.clip_by_global_norm(TWO, {"kernel": 1.0, "bias": 2.0})
