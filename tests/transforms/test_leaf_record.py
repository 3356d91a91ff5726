"""`record="leaves"` of a global clip: the norm of each leaf beside that of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental.sparse import BCOO

import optclip
from optclip import thresholds
from tests.support import helpers
from tests.support.mapped import NORM, SPECS, TREE, mapped, square_norm


def by_hand(x, norm):
    """The norm of one leaf in float64."""
    modulus = np.abs(np.asarray(x).astype(np.float64)).ravel()
    if norm == "rms":
        return np.sqrt(np.mean(modulus**2))
    if norm == np.inf:
        return np.max(modulus)
    return np.sum(modulus**norm) ** (1 / norm)


def leaf_norms(opt_state):
    """What the metrics say of leaves, by their paths."""
    start = "clip/leaf_norm/"
    found = optclip.metrics(opt_state).items()
    return {key.removeprefix(start): x for key, x in found if key.startswith(start)}


def check(opt_state, tree, norm=2, rtol=1e-6):
    """The record has the norm of each of these leaves, and of no other."""
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }
    found = leaf_norms(opt_state)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], by_hand(x, norm), rtol=rtol)


def once(tx, tree):
    return tx.update(tree, tx.init(tree))


def clip(limit=2.0, **options):
    return optclip.clip_by_global_norm(limit, record="leaves", **options)


@pytest.mark.parametrize("norm", [2, 1, np.inf, 3, "rms"])
def test_it_has_the_norm_of_each_leaf_of_the_order_of_the_clip(norm, run):
    tree = helpers.gradients()
    tx = optclip.clip_by(0.1, norm=norm, record="leaves")
    _, state = run(lambda tree: once(tx, tree))(tree)
    check(state, tree, norm, rtol=1e-5 if norm == 3 else 1e-6)


@pytest.mark.parametrize("norm", [2, 1, np.inf, 3, "rms"])
def test_the_clip_is_that_without_it(norm):
    """The norm of all may be summed in another order."""
    tree = helpers.gradients()

    @helpers.quick_jit
    def both(tree):
        pair = (optclip.clip_by(0.1, norm=norm, record=r) for r in ("leaves", True))
        return [once(tx, tree) for tx in pair]

    (found, state), (expected, plain) = both(tree)
    assert helpers.differs(found, tree)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
    )
    wanted = optclip.metrics(plain)
    kept = {key: x for key, x in optclip.metrics(state).items() if key in wanted}
    assert kept.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(kept[key], value, rtol=1e-6, err_msg=key)


def test_leaves_whose_norms_count_as_0_are_in_the_norm_of_all():
    """Each of 2**-61, below what a norm is; all of them of 2**-56."""
    tree = {str(i): jnp.full(1, 2.0**-61) for i in range(1024)}
    _, state = helpers.quick_jit(lambda tree: once(clip(1.0), tree))(tree)
    np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], 2.0**-56, 1e-6)
    assert leaf_norms(state)["0"] == 0


@pytest.mark.parametrize("limit", [2.0, thresholds.quantile(0.5, window=4)])
def test_a_scan_traces_it_once_and_keeps_its_structure(limit):
    tx, traces = clip(limit), []
    tree = helpers.gradients()

    @jax.jit
    def train(tree):
        def step(state, scale):
            traces.append(scale)
            scaled = jax.tree.map(lambda x: scale * x, tree)
            return tx.update(scaled, state)[1], ()

        return jax.lax.scan(step, tx.init(tree), jnp.array([1.0, 10.0, 3.0]))[0]

    state = train(tree)
    helpers.assert_same_types(state, tx.init(tree))
    check(state, jax.tree.map(lambda x: 3 * x, tree))
    assert len(traces) == 1


def test_inside_shard_map_a_leaf_that_is_split_has_the_norm_of_all_its_parts():
    tx = clip(1.0)

    def update(tree):
        clipped, state = once(tx, tree)
        return clipped, optclip.metrics(state)

    clipped, found = mapped(update, (SPECS, P()))(TREE)
    np.testing.assert_allclose(found["clip/norm"], NORM, rtol=1e-6)
    for key, x in TREE.items():
        norm = found[f"clip/leaf_norm/{key}"]
        np.testing.assert_allclose(norm, square_norm(x), rtol=1e-6)
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


def test_leaves_of_all_widths_need_no_implicit_promotion():
    with jax.enable_x64(True):
        tree = helpers.mixed_gradients() | {"wide": jnp.array([3.0, 4.0], jnp.float64)}
        tx = helpers.strict(clip())
        found, state = jax.jit(lambda tree: once(tx, tree))(tree)
        helpers.assert_same_types(found, tree)
        helpers.assert_same_types(state, tx.init(tree))
        check(state, tree)
        norm = np.sqrt(sum(by_hand(x, 2) ** 2 for x in jax.tree.leaves(tree)))
        np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], norm, rtol=1e-6)


def test_what_is_dropped_counts_in_no_leaf():
    tree = {"a": jnp.array([3.0, jnp.nan, 4.0]), "b": jnp.array([12.0])}
    found, state = once(clip(6.5, nonfinite="drop"), tree)
    check(state, {"a": np.array([3.0, 4.0]), "b": tree["b"]})
    np.testing.assert_allclose(found["a"], [1.5, 0.0, 2.0], rtol=1e-6)
    assert optclip.metrics(state)["clip/nonfinite"] == 1


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_it_says_which_leaf_is_not_finite(policy):
    tree = {"a": jnp.array([3.0, jnp.nan]), "b": jnp.array([4.0])}
    _, state = once(clip(nonfinite=policy), tree)
    found = leaf_norms(state)
    assert np.isnan(found["a"])
    assert found["b"] == 4


@pytest.mark.parametrize("argument", ["mask", "norm_mask"])
def test_a_leaf_that_enters_no_norm_has_none(argument):
    tree = helpers.gradients()
    some = optclip.by_path(lambda path: path != "dense/kernel")
    _, state = once(clip(**{argument: some}), tree)
    del tree["dense"]["kernel"]
    check(state, tree)


def test_a_leaf_that_is_only_measured_has_its_norm():
    tree = helpers.gradients()
    some = optclip.by_path(lambda path: path != "dense/kernel")
    found, state = once(clip(clip_mask=some), tree)
    helpers.assert_identical(found["dense"]["kernel"], tree["dense"]["kernel"])
    check(state, tree)


def test_rows_of_a_sparse_leaf_that_are_given_twice_are_added_first():
    rows = jnp.array([[1.0, 2.0], [2.0, 2.0], [0.0, 12.0]])
    sparse = BCOO((rows, jnp.array([[0], [0], [2]])), shape=(4, 2))
    tree = {"embed": sparse, "w": jnp.array([3.0])}
    _, state = once(clip(), tree)
    np.testing.assert_allclose(leaf_norms(state)["embed"], 13.0, rtol=1e-6)
    np.testing.assert_allclose(leaf_norms(state)["w"], 3.0, rtol=1e-6)


def test_updates_of_other_leaves_than_the_state_are_refused(run):
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = clip()
    state = tx.init(tree)
    words = "updates must have the leaves that the state was made for.*'b'.*Give init"
    for other in ({"a": jnp.ones(2)}, {**tree, "c": jnp.ones(2)}):
        with pytest.raises(ValueError, match=words):
            run(tx.update)(other, state)


def test_a_state_without_leaf_norms_is_refused_and_the_other_way():
    tree = {"a": jnp.ones(2)}
    pair = clip(), optclip.clip_by_global_norm(2.0)
    for tx, other in (pair, pair[::-1]):
        with pytest.raises(ValueError, match="`state` must be .* same `record=`.*Give"):
            tx.update(tree, other.init(tree))


def test_the_heatmap_has_a_row_a_leaf():
    tx, tree = clip(), {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    history, state = [], tx.init(tree)
    for _ in range(2):
        _, state = tx.update(tree, state)
        history.append(optclip.metrics(state))
    ax = optclip.plot.heatmap(history)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a"]
    np.testing.assert_array_equal(ax.images[0].get_array(), [[4.0, 4.0], [3.0, 3.0]])


def test_the_summary_is_that_without_it():
    tree = helpers.gradients()
    found = [
        optclip.summary(once(tx, tree)[1])
        for tx in (clip(), optclip.clip_by_global_norm(2.0))
    ]
    assert found[0] == found[1]
