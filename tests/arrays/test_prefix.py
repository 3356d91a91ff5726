"""Masks, labels and thresholds may be prefix trees or functions of a path."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F


def test_mask_prefix_covers_sparse_leaves_and_none():
    mat = BCOO((jnp.array([3.0]), jnp.array([[1]])), shape=(4,))
    tree = {"x": [mat, jnp.array([4.0])], "y": None, "z": jnp.array([9.0])}
    assert F.global_norm(tree, mask={"x": True, "y": True, "z": False}) == 5.0
    by_map = jax.tree.map(lambda _: True, tree)
    np.testing.assert_allclose(F.global_norm(tree, mask=by_map), np.sqrt(106))


def test_by_path_joins_keys_with_slashes():
    paths = []
    tree = {"enc": [{"w": 1.0}, {"w": 2.0}], "none": None}
    mask = optclip.by_path(lambda path: paths.append(path) or True)(tree)
    assert paths == ["enc/0/w", "enc/1/w"]
    assert mask == {"enc": [{"w": True}, {"w": True}], "none": None}


class NamedArray:
    """Hold an array in a node without keys, as haliax does."""

    def __init__(self, array):
        self.array = array


jax.tree_util.register_pytree_node(
    NamedArray,
    lambda node: ((node.array,), None),
    lambda _, children: NamedArray(*children),
)


def test_by_path_in_place_of_function_of_path_is_equal():
    """Arguments such as `stacked` take a function of the path of one leaf."""
    layers = {"layers": {"w": np.ones((2, 3, 4))}, "w": np.ones((3, 4))}
    plain, made = (
        optclip.units(stacked=function).blocks(layers)
        for function in (is_stacked, optclip.by_path(is_stacked))
    )
    assert plain["layers"]["w"].axis == made["layers"]["w"].axis == (1,)
    assert plain["w"].axis == made["w"].axis == (0,)


def is_stacked(path):
    return path.startswith("layers")


def test_by_path_array_in_keyless_node_has_path_of_node():
    tree = {"dense": {"weight": NamedArray(jnp.full(4, 3.0)), "bias": jnp.ones(1)}}
    mask = optclip.by_path(lambda path: path == "dense/weight")
    clipped = F.clip_by_norm(tree, 1.0, mask=mask)["dense"]
    np.testing.assert_allclose(clipped["weight"].array, np.full(4, 0.5))
    np.testing.assert_array_equal(clipped["bias"], [1.0])


Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize("container", [collections.OrderedDict, Pair])
@pytest.mark.parametrize(
    "clip",
    [
        lambda tree: F.clip_by_norm(tree, {"a": 1.0, "b": None}),
        lambda tree: F.clip_by_norm(tree, 1.0, mask={"a": True, "b": False}),
        lambda tree: F.clip_by_group_norm(tree, 1.0, {"a": "group", "b": None})[0],
    ],
    ids=["thresholds", "mask", "labels"],
)
def test_dict_describes_container_with_its_keys(container, clip):
    """Such as a FrozenDict of Flax."""
    clipped = clip(container(a=jnp.array([3.0, 4.0]), b=jnp.array([5.0])))
    assert isinstance(clipped, container)
    first, second = jax.tree.leaves(clipped)
    np.testing.assert_allclose(first, [0.6, 0.8], 1e-6)
    assert second == 5.0


BY_LABEL = {"shown": 1.0, "hidden": 2.0}


def in_b(path):
    return "hidden" if path.startswith("b") else "shown"


@pytest.mark.parametrize(
    "clip",
    [
        optclip.clip_by_group_norm(BY_LABEL, optclip.by_path(in_b)),
        optclip.clip_by_group_norm(
            BY_LABEL, {"a": "shown", "b": {"w": "hidden", "v": "hidden"}}
        ),
        optclip.clip_by_norm({"a": 1.0, "b": {"w": 2.0, "v": 2.0}}),
    ],
    ids=["function", "tree", "leaves"],
)
def test_entries_of_leaves_hidden_by_optax_are_ignored(clip):
    tree = {"a": jnp.array([3.0, 4.0]), "b": {"w": jnp.array([5.0]), "v": jnp.zeros(1)}}
    masked = optax.masked(clip, {"a": True, "b": False})
    parts = optax.partition({"p": clip, "q": clip}, {"a": "p", "b": "q"})
    for tx, expected in ((masked, 5.0), (parts, 2.0)):
        clipped, _ = tx.update(tree, tx.init(tree))
        np.testing.assert_allclose(clipped["a"], [0.6, 0.8], 1e-6)
        np.testing.assert_allclose(clipped["b"]["w"], [expected], 1e-6)
