"""Which leaves enter a norm and which are scaled are two choices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

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
def test_both_leave_out_altogether(mask, run):
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
        lambda t, m: F.clip_by_group_norm(t, 1.0, BY_GROUP, clip_mask=m)[0],
    ],
    ids=["norm", "rms", "average", "value", "group"],
)
def test_clip_mask_in_every_function(mask, clip):
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


@pytest.mark.parametrize("name", ["norm_mask", "clip_mask"])
def test_bad_masks_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a prefix of the structure"):
        F.clip_by_global_norm(TREE, 1.0, **{name: {"a": True}})
    with pytest.raises(
        TypeError, match=f"`{name}` at the leaf 'a' must be True or False.*got 1"
    ):
        F.clip_by_global_norm(TREE, 1.0, **{name: {"a": 1, "b": True, "frozen": True}})
    with pytest.raises(TypeError, match=f"`{name}` at .*before tracing"):
        F.clip_by_global_norm(TREE, 1.0, **{name: jnp.array(True)})


def test_a_path_function_without_by_path_is_caught():
    """It would see the whole tree, and mask or label it with one value."""
    for name in ("norm_mask", "clip_mask"):
        with pytest.raises(TypeError, match=f"`{name}` must return .*optclip.by_path"):
            F.clip_by_global_norm(TREE, 1.0, **{name: lambda path: "a" in path})
    with pytest.raises(TypeError, match="`groups` must return .*optclip.by_path"):
        F.clip_by_group_norm(TREE, 1.0, lambda path: "x" if "a" in path else "y")


def test_masked_leaves_keep_the_bits():
    tree = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1e-40, jnp.nan])}
    mask = {"a": True, "b": False}
    found, _ = F.clip_by_global_norm(tree, 1.0, mask=mask)
    assert helpers.differs(found["a"], tree["a"])
    helpers.assert_identical(found["b"], tree["b"])


TWO = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}


@pytest.mark.parametrize("argument", ["norm_mask", "clip_mask"])
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
    found, _ = F.clip_by_global_norm(jnp.ones(3), 1.0, **{argument: False})
    helpers.assert_identical(found, jnp.ones(3))


def test_a_function_of_a_path_is_recognized():
    with pytest.raises(TypeError, match=r"`clip_mask` failed.*endswith.*by_path"):
        F.clip_by_global_norm(TWO, 1.0, clip_mask=lambda path: path.endswith("s"))


def test_one_norm_takes_one_number():
    with pytest.raises(ValueError, match=r"max_norm.*one norm here.*clip_by_norm"):
        F.clip_by_global_norm(TWO, {"kernel": 1.0, "bias": 2.0})
