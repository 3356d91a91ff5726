"""`record="leaves"` of global-norm clipping records the norm of each leaf too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import thresholds
from tests.support import helpers, oracles

TREE = helpers.gradients()
ORDERS = (2, 1, np.inf, 3, "rms")
OTHERS = optclip.by_path(lambda path: path != "dense/kernel")


def oracle(x, norm):
    """Return the norm of one leaf in float64."""
    wide = np.asarray(x).astype(np.float64)
    return oracles.rms(wide) if norm == "rms" else oracles.norm(wide, norm)


def leaf_norms(opt_state):
    start = "clip/leaf_norm/"
    found = optclip.metrics(opt_state).items()
    return {key.removeprefix(start): x for key, x in found if key.startswith(start)}


def check(opt_state, tree, norm=2, rtol=1e-6):
    """Check that the record has the norms of exactly these leaves."""
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }
    found = leaf_norms(opt_state)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], oracle(x, norm), rtol=rtol)


@functools.partial(jax.jit, static_argnums=0)
def once(tx, tree):
    return tx.update(tree, tx.init(tree))


def clip(limit=2.0, **options):
    return optclip.clip_by(limit, record="leaves", **options)


def test_leaf_norms_have_the_order_of_the_clip_and_do_not_change_it():
    @helpers.quick_jit
    def step(tree):
        return [
            [
                once(optclip.clip_by(0.1, norm=norm, record=record), tree)
                for record in ("leaves", True)
            ]
            for norm in ORDERS
        ]

    for norm, pair in zip(ORDERS, step(TREE), strict=True):
        (clipped, state), (expected, plain) = pair
        check(state, TREE, norm, rtol=1e-5 if norm == 3 else 1e-6)
        assert helpers.differs(clipped, TREE)
        # The order of summation may differ for the norm of the tree.
        helpers.assert_close(clipped, expected)
        metrics = optclip.metrics(state)
        for key, value in optclip.metrics(plain).items():
            np.testing.assert_allclose(metrics[key], value, rtol=1e-6, err_msg=key)
        assert optclip.summary(state).startswith(optclip.summary(plain))


def test_leaf_norms_flushed_to_zero_count_in_the_norm_of_the_tree():
    """Each is 2**-61, below the smallest norm; all of them together are 2**-58."""
    tree = {str(i): np.full(1, 2.0**-61, np.float32) for i in range(64)}
    _, state = helpers.quick_jit(lambda tree: once(clip(1.0), tree))(tree)
    np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], 2.0**-58, 1e-6)
    assert leaf_norms(state)["0"] == 0


def test_leaf_norms_of_four_dtypes_need_no_implicit_promotion():
    with jax.enable_x64(True):
        tree = helpers.mixed_gradients() | {"wide": jnp.array([3.0, 4.0], jnp.float64)}
        for limit in (thresholds.quantile(0.5, window=4), 2.0):
            tx = helpers.tx_without_promotion(clip(limit))
            found, state = helpers.quick_jit(lambda tree, tx=tx: once(tx, tree))(tree)
            helpers.assert_same_types((found, state), (tree, tx.init(tree)))
            check(state, tree)
        norm = np.sqrt(sum(oracle(x, 2) ** 2 for x in jax.tree.leaves(tree)))
        np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], norm, rtol=1e-6)


MEASURED = {**TREE, "dense": {"bias": TREE["dense"]["bias"]}}


@pytest.mark.parametrize(
    ("argument", "measured"),
    [("mask", MEASURED), ("norm_mask", MEASURED), ("clip_mask", TREE)],
)
def test_leaf_norms_are_of_measured_leaves(argument, measured):
    _, state = once(clip(**{argument: OTHERS}), TREE)
    check(state, measured)


ROWS = [[1.0, 2.0], [2.0, 2.0], [0.0, 12.0]]
# The first two rows are of the same index.
SPARSE = BCOO((jnp.array(ROWS), jnp.array([[0], [0], [2]])), shape=(4, 2))
BROKEN = {"a": np.float32([3.0, np.nan, 4.0]), "b": np.float32([12.0])}


@pytest.mark.parametrize(
    ("options", "tree", "norms"),
    [
        ({}, {"embed": SPARSE, "w": jnp.array([3.0])}, {"embed": 13, "w": 3}),
        ({"norm": "spectral"}, {"a": np.float32([[0, 4], [1, 0]])}, {"a": 4}),
        ({"nonfinite": "propagate"}, BROKEN, {"a": np.nan, "b": 12}),
        ({"nonfinite": "zero"}, BROKEN, {"a": np.nan, "b": 12}),
    ],
    ids=["sparse", "matrix", "propagate", "zero"],
)
def test_leaf_norms_of_sparse_matrix_and_nonfinite_leaves(options, tree, norms):
    _, state = once(clip(**options), tree)
    found = leaf_norms(state)
    assert found.keys() == norms.keys()
    np.testing.assert_allclose(list(found.values()), list(norms.values()), rtol=1e-6)
    assert optclip.metrics(state)["clip/nonfinite"] == (tree is BROKEN)


SCOPES = {"tree": "tree", "leaf": "leaf", "group": optclip.groups({"a": "x", "b": "y"})}


@pytest.mark.parametrize("over", SCOPES)
@pytest.mark.parametrize("other", SCOPES)
@pytest.mark.parametrize("record", [True, "leaves"])
def test_state_of_other_scope_or_record_names_what_changed(over, other, record):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = optclip.clip_by(1.0, over=SCOPES[over], record=record)
    for made in (True, "leaves"):
        state = optclip.clip_by(1.0, over=SCOPES[other], record=made).init(tree)
        # Groups have the same entries with both.
        if over == other and (made == record or over == "group"):
            continue
        cause = "record=" if over == other else "over="
        with pytest.raises(ValueError, match=f"Most likely {cause} changed"):
            tx.update(tree, state)
