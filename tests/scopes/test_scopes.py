"""What shares a norm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip.norms import Block
from optclip.scopes import _scope
from tests.support import helpers, oracles
from tests.support.covering import RUNS
from tests.support.registry import numpy_tree


def clip(tx, tree):
    return tx.update(tree, tx.init(tree))[0]


def test_the_scopes_arrange_blocks():
    tree = {"a": jnp.ones((2, 3)), "b": None, "c": [jnp.ones(4)]}
    assert len(_scope.TREE.blocks(tree).leaves) == 2
    assert _scope.LEAF.blocks(tree)["b"] is None
    assert isinstance(_scope.LEAF.blocks(tree)["c"][0], Block)
    assert _scope.ELEMENT.blocks(tree)["a"].axis == ()
    assert optclip.axes(-1).blocks(tree)["a"].axis == (1,)
    grouped = optclip.groups({"a": "x", "b": "x", "c": "y"}).blocks(tree)
    assert {label: len(b.leaves) for label, b in grouped.items()} == {"x": 1, "y": 1}


@pytest.mark.covering(axis=(0, 1, -1, (0, 1), (0, 2), (-1, 0)), run=RUNS)
def test_norms_along_axes_are_those_of_numpy(axis, run):
    x = np.random.default_rng(0).normal(size=(3, 4, 5)) * 3
    size = np.sqrt(np.sum(x**2, axis=axis, keepdims=True))
    expected = x * np.minimum(1, 4.0 / size)
    tx = helpers.strict(optclip.clip_by_norm(4.0, axis=axis))
    found = run(lambda t: clip(tx, t))(jnp.asarray(x, jnp.float32))
    assert np.any(size > 4)
    assert axis not in (0, 1, -1) or np.any(size < 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_axes_take_a_threshold_a_unit():
    x = jnp.ones((4, 2))
    tx = optclip.clip_by_norm(jnp.array([[1.0, 4.0]]), axis=0)
    found = clip(tx, x)
    np.testing.assert_allclose(found, [[0.5, 1.0]] * 4, rtol=1e-6)


def test_axes_out_of_range_name_the_leaf():
    tx = optclip.clip_by_norm(1.0, axis=1)
    with pytest.raises(ValueError, match="'bias' of shape.*mask="):
        tx.init({"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))})


def test_an_axis_traced_by_inject_hyperparams_names_the_remedy():
    import optax

    factory = optax.inject_hyperparams(optclip.clip_by_norm)
    with pytest.raises(TypeError, match="static_args"):
        factory(max_norm=1.0, axis=0).init(jnp.ones((2, 2)))
    told = optax.inject_hyperparams(optclip.clip_by_norm, static_args=("axis",))
    tx = told(max_norm=1.0, axis=0)
    x = jnp.array([[3.0, 0.1], [4.0, 0.1]])
    found, _ = tx.update(x, tx.init(x), x)
    np.testing.assert_allclose(found, [[0.6, 0.1], [0.8, 0.1]], rtol=1e-6)


def test_each_row_of_a_sparse_leaf_is_clipped_by_itself(run):
    """Each row of an embedding by itself: along the dense axes of the data."""
    dense = np.zeros((5, 4), np.float32)
    dense[1], dense[3] = [3, 4, 0, 1], [6, 8, 2, 0]
    mat = BCOO.fromdense(jnp.asarray(dense), n_dense=1, nse=4)
    size = np.sqrt(np.sum(dense**2, axis=1, keepdims=True))
    expected = dense * np.minimum(1, 6.0 / np.maximum(size, 1e-9))
    found = run(lambda t: clip(optclip.clip_by_norm(6.0, axis=1), t))(mat)
    assert not np.array_equal(expected, dense)
    np.testing.assert_allclose(found.todense(), expected, rtol=1e-6)


def test_padding_of_a_batched_sparse_leaf_counts_in_no_norm():
    data = jnp.array([[[3.0], [4.0], [100.0]], [[6.0], [8.0], [0.0]]])
    rows = jnp.array([[[0], [1], [9]], [[1], [1], [9]]])
    mat = BCOO((data, rows), shape=(2, 3, 1))
    norm = np.linalg.norm(mat.todense())
    np.testing.assert_allclose(optclip.functional.global_norm(mat), norm, rtol=1e-6)
    found = clip(optclip.clip_by_value(5.0), mat)
    np.testing.assert_allclose(found.todense(), np.clip(mat.todense(), -5, 5))


def test_groups_by_function_and_by_tree_agree():
    tree = helpers.gradients()
    labels = {"dense": {"bias": "small", "kernel": "big"}, "out": "big"}
    named = optclip.by_path(lambda path: "small" if "bias" in path else "big")
    a = clip(optclip.clip_by_group_norm(1.0, labels), tree)
    b = clip(optclip.clip_by_group_norm(1.0, named), tree)
    helpers.assert_identical(a, b)
    big = {"kernel": tree["dense"]["kernel"], "out": tree["out"]}
    expected = oracles.by_tree(numpy_tree(big), 1.0)
    helpers.assert_close(a["out"], expected["out"])
    helpers.assert_identical(a["dense"]["bias"], tree["dense"]["bias"])


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
    np.testing.assert_allclose(found["a"], w / np.sqrt(2 * 25 + 144), rtol=1e-6)
    np.testing.assert_allclose(found["s"].data, 12 / np.sqrt(194), rtol=1e-6)
    assert found["n"] == 7
    for each in trees:
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(each))
        assert isinstance(each["s"], BCOO)


def test_a_leaf_in_no_group_is_left_alone():
    tree = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    found = clip(optclip.clip_by_group_norm(1.0, {"a": None, "b": "x"}), tree)
    assert found["a"] == 30.0
    assert found["b"] == 1.0


def test_thresholds_by_group_and_leaf_mix_kinds():
    """Numbers, schedules, rules and None side by side."""
    tree = {"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": jnp.array([5.0])}
    limits = {"a": 1.0, "b": lambda step: 2.0 + step, "c": None}
    for tx in (
        optclip.clip_by_norm(limits),
        optclip.clip_by_group_norm(limits, {"a": "a", "b": "b", "c": "c"}),
    ):
        state = tx.init(tree)
        first, state = tx.update(tree, state)
        second, state = tx.update(tree, state)
        assert [float(first[k][0]) for k in "abc"] == [1.0, 2.0, 5.0]
        assert [float(second[k][0]) for k in "abc"] == [1.0, 3.0, 5.0]


def test_elements_may_be_clipped_softly():
    x = jnp.array([3.0, -4.0, 0.0])
    found = clip(optclip.clip_by(4.0, over="element", response="smooth"), x)
    np.testing.assert_allclose(found, [2.4, -4 / np.sqrt(2), 0.0], rtol=1e-6)
    found = clip(optclip.clip_by(4.0, over="element", response="normalize"), x)
    np.testing.assert_array_equal(found, [4.0, -4.0, 0.0])


def test_scopes_are_static():
    """Frozen and hashable, so jit and inject_hyperparams can take them."""
    assert hash(optclip.axes((0, 1))) == hash(optclip.axes((0, 1)))
    assert not callable(_scope.TREE)
    assert jax.tree.leaves(_scope.LEAF) == [_scope.LEAF]


def test_equal_scopes_are_one():
    """They are compared, and programs are kept by them: as values, and for good."""
    made = [lambda: optclip.axes(0), optclip.units, _scope.Tree, _scope.Leaf]
    made += [_scope.Element]
    for make in made:
        assert make() == make()
        assert hash(make()) == hash(make())
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().axis = None
