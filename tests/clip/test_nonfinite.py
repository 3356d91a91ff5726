"""What the table of `nonfinite=` does not hold: limits, dtypes, memory, leaves by count.

The table itself, cell by cell, is in test_nonfinite_cells.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from tests.support import helpers
from tests.support.covering import RUNS
from tests.support.helpers import quick_jit
from tests.support.leaf_kinds import FLOATS
from tests.support.nonfinite_cells import POLICIES
from tests.support.registry import LargestSoFar

BAD = [jnp.nan, jnp.inf, -jnp.inf]
bad_values = pytest.mark.parametrize("bad", BAD, ids=["nan", "inf", "-inf"])
policies = pytest.mark.parametrize("policy", POLICIES)
CLIPS = {
    "tree": lambda t, c, **kw: F.clip_by_global_norm(t, c, **kw)[0],
    "leaf": lambda t, c, **kw: F.clip_by_norm(t, c, **kw),
    "axes": lambda t, c, **kw: F.clip_by_norm(t, c, axis=-1, **kw),
    "element": lambda t, c, **kw: F.clip_by_value(t, lower=-c, upper=c, **kw),
}
SCOPES = ["tree", "leaf", optclip.axes(-1), "element"]
# Beyond the largest number of the other two no float32 bound goes.
NARROW = [name for name in FLOATS if name not in ("bfloat16", "float32")]


def tree_with(bad):
    return {"sick": jnp.array([bad, 6.0]), "well": jnp.array([8.0])}


def sparse_with(bad, *, unique):
    rows = jnp.array([[1], [3], [2] if unique else [1]])
    data = jnp.array([[6.0, 8.0], [bad, 1e-40], [0.0, -0.0]])
    return BCOO((data, rows), shape=(5, 2), unique_indices=unique)


@pytest.mark.covering(policy=POLICIES, scope=tuple(CLIPS), run=RUNS)
def test_an_infinite_threshold_touches_nothing(policy, scope, run):
    """Dense or sparse, under any policy, to the bit; the finite one shows it can."""
    clip = CLIPS[scope]
    tree = tree_with(jnp.nan) | {"more": jnp.array([jnp.inf, -0.0, 1e-40])}
    tree["rows"] = sparse_with(jnp.inf, unique=True)
    untouched = run(lambda t: clip(t, jnp.inf, nonfinite=policy))(tree)
    helpers.assert_identical(untouched, tree)
    clipped = quick_jit(lambda t: clip(t, 1.0, nonfinite=policy))(tree)
    assert helpers.differs(clipped, tree)


@pytest.mark.covering(policy=POLICIES, scope=tuple(CLIPS))
def test_an_infinite_threshold_and_duplicates(policy, scope):
    """A clip that sums them first gives the same dense gradient all the same."""
    clip = quick_jit(lambda m: CLIPS[scope](m, jnp.inf, nonfinite=policy))
    mat = sparse_with(jnp.nan, unique=False)
    found = clip(mat)
    np.testing.assert_array_equal(found.todense(), mat.todense())


@pytest.mark.parametrize("scope", CLIPS)
def test_a_traced_nan_threshold_is_loud(scope):
    """It is the caller's error, which no policy for updates may hide."""

    def clips(tree, c):
        return [CLIPS[scope](tree, c, nonfinite=policy) for policy in POLICIES]

    found = quick_jit(clips)(tree_with(3.0), jnp.nan)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(found))


@policies
@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: type(s).__name__)
def test_a_scheduled_nan_threshold_is_loud(policy, scope):
    tree = tree_with(3.0)
    tx = optclip.clip_by(lambda step: step * jnp.nan, over=scope, nonfinite=policy)
    found, _ = quick_jit(tx.update)(tree, tx.init(tree))
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(found))


def test_a_bound_beyond_the_largest_number_of_the_dtype(run):
    """What is past it comes to the largest number there is, of either sign.

    inf is above any bound; the lower bound here is above all that the dtype has.
    """

    def clip_all(tree):
        def apart(x, lower, upper):
            return F.clip_by_value(x, lower=lower, upper=upper)

        tops = {name: float(jnp.finfo(x.dtype).max) for name, x in tree.items()}
        both = {k: apart(x, -4 * tops[k], 4 * tops[k]) for k, x in tree.items()}
        up = {k: apart(x, 4 * tops[k], 8 * tops[k]) for k, x in tree.items()}
        return both, up

    wide = jnp.array([-jnp.inf, -1.0, 1.0, jnp.inf])
    tree = {name: wide.astype(getattr(jnp, name)) for name in NARROW}
    both, up = run(clip_all)(tree)
    for name in NARROW:
        x, top = tree[name], float(jnp.finfo(tree[name].dtype).max)
        assert both[name].dtype == x.dtype
        given, found, raised = (
            np.asarray(leaf[name].astype(jnp.float32)) for leaf in (tree, both, up)
        )
        # A dtype without inf holds NaN in its place, which stays, or its largest.
        expected = np.where(np.isnan(given), np.nan, np.clip(given, -top, top))
        np.testing.assert_array_equal(found, expected, err_msg=name)
        expected = np.where(np.isnan(given), np.nan, top)
        np.testing.assert_array_equal(raised, expected, err_msg=name)
        assert np.any(raised != given)


@bad_values
def test_drop_drops_below_the_threshold_too(bad, run):
    found = run(lambda t: CLIPS["tree"](t, 100.0, nonfinite="drop"))(tree_with(bad))
    np.testing.assert_array_equal(found["sick"], [0.0, 6.0])


@bad_values
def test_a_bad_duplicate_is_a_bad_entry_of_the_dense_gradient(bad, run):
    rows = jnp.array([[1], [2], [1]])
    mat = BCOO((jnp.array([6.0, 8.0, bad]), rows), shape=(4,))
    found = run(lambda m: CLIPS["tree"](m, 1.0, nonfinite="drop"))(mat).todense()
    np.testing.assert_allclose(found, [0, 0, 1, 0], rtol=1e-6)


@pytest.mark.covering(policy=POLICIES, run=RUNS)
def test_overflow_to_inf_in_the_sum_of_three_duplicates(policy, run):
    """Finite as stored, inf as the dense gradient: that is what a policy looks at."""
    rows = jnp.array([[1], [2], [1], [1]])
    mat = BCOO((jnp.array([2e38, 5.0, 2e38, 2e38]), rows), shape=(4,))
    found = run(lambda m: CLIPS["tree"](m, 1.0, nonfinite=policy))(mat).todense()
    lost = [0, np.nan, np.nan, 0]
    expected = {"zero": [0, 0, 0, 0], "drop": [0, 0, 1, 0]}.get(policy, lost)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_raise_sees_leaves_that_are_only_measured_and_no_others():
    tree, mask = tree_with(jnp.nan), {"sick": False, "well": True}

    def message(**masks):
        def clip(tree):
            return CLIPS["tree"](tree, 1.0, nonfinite="raise", **masks)

        return checkify.checkify(clip)(tree)[0].get()

    assert "leaf 'sick'" in message(clip_mask=mask)
    assert "leaf 'sick'" in message(norm_mask=mask)
    assert message(mask=mask) is None


def test_a_leaf_in_no_group_is_left_alone_by_every_policy():
    labels = {"sick": None, "well": "x"}
    for policy in POLICIES:
        clip = checkify.checkify(
            lambda t, policy=policy: F.clip_by_group_norm(
                t, 1.0, labels, nonfinite=policy
            )[0]
        )
        error, found = clip(tree_with(jnp.nan))
        assert error.get() is None, policy
        np.testing.assert_array_equal(found["sick"], [np.nan, 6.0])
        assert found["well"] == 1.0


def test_a_given_norm_that_is_not_finite():
    found, norm = F.clip_by_global_norm(jnp.ones(2), 1.0, use_norm=jnp.inf)
    assert np.all(np.isnan(found))
    assert norm == np.inf
    found, _ = F.clip_by_global_norm(
        jnp.ones(2), 1.0, use_norm=jnp.nan, nonfinite="zero"
    )
    assert not np.any(found)


@policies
@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: type(s).__name__)
def test_memory_keeps_out_what_is_not_finite(policy, scope):
    """A rule that saw a NaN or inf remembers what it knew before."""
    tx = optclip.clip_by(LargestSoFar(), over=scope, nonfinite=policy)
    good = jnp.array([[3.0, 4.0]])
    update = quick_jit(tx.update)
    expected, learned = update(good, tx.init(good))
    assert helpers.differs(expected, good)
    after = learned
    for bad in BAD:
        _, after = update(jnp.array([[bad, 1.0]]), after)
    helpers.assert_identical(after.clip_memory, learned.clip_memory)
    found, _ = update(good, after)
    helpers.assert_identical(found, expected)


def test_drop_learns_from_what_is_left():
    tx = optclip.clip_by_global_norm(LargestSoFar(), nonfinite="drop")
    state = tx.init(jnp.zeros(2))
    found, state = tx.update(jnp.array([jnp.nan, 8.0]), state)
    np.testing.assert_array_equal(found, [0.0, 4.0])
    np.testing.assert_array_equal(jax.tree.leaves(state.clip_memory), [8.0])


def test_an_infinite_threshold_does_not_hide_the_leaf_from_raise():
    clip = checkify.checkify(lambda t: CLIPS["tree"](t, jnp.inf, nonfinite="raise"))
    error, found = clip(tree_with(jnp.nan))
    assert "leaf 'sick'" in error.get()
    helpers.assert_identical(found, tree_with(jnp.nan))


def test_zero_is_no_alarm_to_debug_nans():
    """Eagerly each step on the way is looked at: inf - inf would be one too many."""
    with jax.debug_nans(True):
        found, _ = F.clip_by_global_norm(
            jnp.array([jnp.inf, 1.0]), 0.5, nonfinite="zero"
        )
    assert not np.any(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_bounds_of_one_sign_are_no_alarm(dtype):
    """Their sum may be above the largest number, or be NaN."""
    x = jnp.array([1.0, 200.0, 250.0], dtype)
    lower, upper = float(jnp.finfo(dtype).max) * 0.75, float(jnp.finfo(dtype).max)
    with jax.debug_nans(True), jax.debug_infs(True):
        out = F.clip_by_value(x, lower=lower, upper=upper)
    wanted = np.clip(np.asarray(x, np.float64), lower, upper).astype(out.dtype)
    np.testing.assert_array_equal(out, wanted)


def test_raise_names_the_path_that_is_clipped_of_a_tied_array():
    bad = jnp.array([jnp.nan])
    tree, mask = (
        {"a": jnp.ones(1), "b": bad, "c": bad},
        {"a": True, "b": False, "c": True},
    )

    def clip(tree):
        given = {"a": tree["a"], "b": tree["c"], "c": tree["c"]}
        return CLIPS["tree"](given, 1.0, nonfinite="raise", mask=mask)

    assert "leaf 'c'" in checkify.checkify(clip)(tree)[0].get()
