"""The policies of `nonfinite=`: each cell of the table in docs/nan_and_inf.md.

One compiled program per scope and mask holds all three policies.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding

import optclip
from docs.plots_and_tables import nonfinite_table
from optclip import functional as F
from tests.support import covering, helpers
from tests.support import nonfinite_cells as nf
from tests.support.leaf_kinds import FLOATS

OVER = {
    "tree": "tree",
    "leaf": "leaf",
    "axes": optclip.axes(-1),
    "groups": optclip.groups(nf.GROUPS),
    "element": "element",
}
PURE = {
    "tree": lambda t, c, **kw: F.clip_by_global_norm(t, c, **kw)[0],
    "leaf": F.clip_by_norm,
    "axes": functools.partial(F.clip_by_norm, axis=-1),
    "groups": lambda t, c, **kw: F.clip_by_group_norm(t, c, nf.GROUPS, **kw)[0],
    "element": lambda t, c, **kw: F.clip_by_value(t, lower=-c, upper=c, **kw),
}
scopes = pytest.mark.parametrize("scope", nf.SCOPES)


@functools.cache
def clip_with_each_policy(scope, given):
    """Compile the transformations, with the masks of an input."""

    def clip(tree, threshold):
        outcomes = {}
        for policy in nf.POLICIES:
            masks = nf.INPUTS[given].masks
            tx = optclip.clip_by(threshold, over=OVER[scope], nonfinite=policy, **masks)
            clipped, state = tx.update(tree, tx.init(tree))
            outcomes[policy] = clipped, optclip.metrics(state)
        return outcomes

    return helpers.quick_jit(checkify.checkify(clip))


@functools.cache
def outcomes_of(scope, given):
    same_masks = [k for k in nf.INPUTS if nf.INPUTS[k].masks == nf.INPUTS[given].masks]
    clip = clip_with_each_policy(scope, same_masks[0])
    error, outcomes = clip(nf.gradients(nf.INPUTS[given]), nf.LIMIT)
    return error.get(), outcomes


def clips_without_mask(scope, tree, threshold):
    """Return the error and the clipped tree of each policy."""
    error, outcomes = clip_with_each_policy(scope, "nan")(tree, threshold)
    return error.get(), [clipped for clipped, _ in outcomes.values()]


def assert_cell(cell, clipped):
    tree = nf.gradients(cell.input)
    helpers.assert_same_types(clipped, tree)
    assert helpers.differs(clipped, tree)
    for name, leaf in clipped.items():
        leaf = leaf.todense() if name == "rows" else leaf
        np.testing.assert_allclose(leaf, nf.array(cell, name), rtol=1e-6, err_msg=name)


# With a mask, a scope of many leaves and one within a leaf are enough.
MASKED = {
    "norm_mask": ("tree", "axes"),
    "clip_mask": ("groups", "element"),
    "mask": ("tree", "leaf"),
}
COMPILED = [
    cell
    for cell in nf.CELLS
    if covering.full or cell.scope in MASKED.get(cell.given, nf.SCOPES)
]


@pytest.mark.parametrize("cell", COMPILED, ids=lambda cell: cell.id)
def test_clip_by_each_cell_matches_table(cell):
    message, outcomes = outcomes_of(cell.scope, cell.given)
    clipped, metrics = outcomes[cell.policy]
    assert_cell(cell, clipped)
    counts = [int(n) for key, n in metrics.items() if "nonfinite" in key]
    assert max(counts) == nf.measured(cell)
    if cell.policy == "raise":
        leaves = [cell.input.leaf] if cell.input.leaf else nf.GROUPS
        errors = [f"in the leaf '{leaf}' (nonfinite='raise')" for leaf in leaves]
        assert (message is not None) == nf.is_error(cell)
        assert message is None or any(error in message for error in errors)


def test_pure_functions_apply_policy():
    cells = [nf.Cell("zero", "nan", scope) for scope in PURE]

    @helpers.quick_jit
    def clips(tree):
        return [PURE[cell.scope](tree, nf.LIMIT, nonfinite="zero") for cell in cells]

    for cell, clipped in zip(cells, clips(nf.gradients(cells[0].input)), strict=True):
        assert_cell(cell, clipped)


def test_nonfinite_page_contains_current_table():
    """If not, run `python -m docs.plots_and_tables.nonfinite_table`."""
    page = nonfinite_table.PAGE.read_text()
    assert nonfinite_table.table() in page
    assert page == nonfinite_table.with_table(page)


@scopes
def test_raise_finite_updates_is_silent(scope):
    """The NaN in the padding of a BCOO leaf is not an update."""
    tree = nf.gradients(None)
    message, clips = clips_without_mask(scope, tree, nf.LIMIT)
    assert message is None
    assert all(helpers.differs(clipped, tree) for clipped in clips)


@scopes
def test_traced_nan_threshold_gives_nan_under_every_policy(scope):
    """It is the caller's error, which no policy for updates may hide."""
    for clipped in clips_without_mask(scope, nf.gradients(None), np.nan)[1]:
        rows = clipped["rows"].todense()[1:3]
        for leaf in (clipped["kernel"], clipped["head"], rows):
            assert np.all(np.isnan(leaf))


def test_ungrouped_leaf_with_nan_is_unchanged_by_every_policy():
    labels = {"sick": None, "well": "x"}
    tree = {"sick": jnp.float32([np.nan, 6.0]), "well": jnp.float32([8.0])}

    def clips(tree):
        return [
            F.clip_by_group_norm(tree, 1.0, labels, nonfinite=policy)[0]
            for policy in nf.POLICIES
        ]

    error, outcomes = helpers.quick_jit(checkify.checkify(clips))(tree)
    assert error.get() is None
    for clipped in outcomes:
        np.testing.assert_array_equal(clipped["sick"], [np.nan, 6.0])
        assert clipped["well"] == 1.0


def test_raise_in_wrappers_names_leaf():
    tree = {"sick": jnp.float32([np.nan, 6.0]), "well": jnp.float32([8.0])}
    clip = optclip.clip_by_global_norm(1.0, nonfinite="raise")
    inner = optax.chain(clip, optax.sgd(0.5))
    tx = optax.partition({"a": inner, "b": optax.sgd(0.5)}, {"sick": "a", "well": "b"})
    update = checkify.checkify(lambda tree: tx.update(tree, tx.init(tree), tree))
    error, _ = helpers.quick_jit(update)(tree)
    with pytest.raises(checkify.JaxRuntimeError, match="leaf 'sick'"):
        error.throw()


@pytest.mark.parametrize("use_norm", [None, np.float32(np.inf)])
def test_raise_reports_norm_of_finite_leaves(use_norm):
    """The norm overflows, or the caller passes one that did."""
    clip = functools.partial(
        F.clip_by_global_norm, nonfinite="raise", use_norm=use_norm
    )
    error, _ = checkify.checkify(clip)(np.float32([3e38, 3e38]), 1.0)
    with pytest.raises(checkify.JaxRuntimeError, match="non-finite norm"):
        error.throw()


def test_zero_raises_no_alarm_under_debug_nans():
    """Eagerly each operation is checked: `inf - inf` would raise."""
    with jax.debug_nans(True):
        clipped, _ = F.clip_by_global_norm(
            jnp.float32([np.inf, 1.0]), 0.5, nonfinite="zero"
        )
    assert not np.any(clipped)


# No float32 bound is beyond the largest number of the other two.
NARROW = [name for name in FLOATS if name not in ("bfloat16", "float32")]


def test_bounds_beyond_dtype_give_its_largest_number():
    """The second lower bound is above every number of the dtype."""
    tops = {name: float(jnp.finfo(name).max) for name in NARROW}

    @helpers.quick_jit
    def clip(tree):
        def between(name, low, high):
            lower, upper = low * tops[name], high * tops[name]
            return F.clip_by_value(tree[name], lower=lower, upper=upper)

        return {name: (between(name, -4, 4), between(name, 4, 8)) for name in tree}

    wide = np.array([-np.inf, -1.0, 1.0, np.inf])
    tree = {name: wide.astype(jnp.dtype(name)) for name in NARROW}
    for name, pair in clip(tree).items():
        # A dtype without inf holds NaN in its place, which stays, or its largest.
        given, top = np.asarray(tree[name], np.float32), tops[name]
        for found, least in zip(pair, (-top, top), strict=True):
            assert found.dtype == name
            expected = np.where(np.isnan(given), np.nan, np.clip(given, least, top))
            np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


# XLA on CPU loses a NaN in a maximum of 4,096 elements or more (jaxlib 0.10.2 and
# 0.12.0.1), and in any maximum over devices.
SIDE = 64


def recorded(tx, x):
    return optclip.metrics(tx.update(x, tx.init(x))[1])


def largest_slice(x, axis, **kwargs):
    tx = optclip.clip_by_norm(0.5, ord=math.inf, axis=axis, **kwargs)
    return recorded(tx, x)["clip/norm"]


def cap(x, method, **kwargs):
    return F.clip_by_singular_value(x, 0.5, method=method, **kwargs)


def largest_element(x):
    return recorded(optclip.clip_by_value(0.5), x)["clip/norm"]


# Functions of a square matrix whose result is NaN if an element is.
MAXIMA = {
    "norm": lambda x: F.global_norm(x, ord=math.inf),
    "norm of order 3": lambda x: F.global_norm(x, ord=3.0),
    "rows": functools.partial(largest_slice, axis=-1),
    "columns": functools.partial(largest_slice, axis=0),
    "eigh": functools.partial(cap, method="eigh"),
    "newton_schulz": functools.partial(cap, method="newton_schulz"),
    "elements": largest_element,
    # The record of so many elements is computed in another way.
    "many elements": lambda x: largest_element(jnp.tile(x, (5, 5))),
    "thresholds": lambda x: recorded(
        optclip.clip_by_value(lambda step: jnp.abs(x)), jnp.full_like(x, 2.0)
    )["clip/threshold"],
    "logits": lambda x: F.max_attention_logit(
        jnp.ones((SIDE, 1, 2)), jnp.ones((SIDE, 1, 2)).at[:, 0].add(x[:, [0, -1]])
    ),
}


def matrix(place=None):
    x = np.eye(SIDE, dtype=np.float32)
    if place is not None:
        x[place, place] = np.nan
    return jnp.asarray(x)


def test_maximum_of_large_array_with_nan_is_nan():
    maxima = helpers.optimized_jit(lambda x: {k: f(x) for k, f in MAXIMA.items()})
    for name, maximum in maxima(matrix()).items():
        assert not np.any(np.isnan(maximum)), name
    for place in (0, SIDE - 1):
        for name, maximum in maxima(matrix(place)).items():
            assert np.all(np.isnan(maximum)), name
        assert np.isnan(MAXIMA["norm"](matrix(place)))


@pytest.mark.parametrize("mode", ["shard_map", *["auto"] * covering.full])
def test_maximum_over_devices_with_nan_is_nan(mode):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    names = ["norm", "norm of order 3", "rows", "newton_schulz", "elements"]

    def maxima(x, **split):
        by_axis = {"rows": split, "newton_schulz": split}
        return {name: MAXIMA[name](x, **by_axis.get(name, {})) for name in names}

    function = maxima
    if mode == "shard_map":
        function = jax.shard_map(
            functools.partial(maxima, axis_name=P("data")),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=dict.fromkeys(names, P()) | {"newton_schulz": P("data")},
        )
    compiled = helpers.optimized_jit(function)
    for place in (0, SIDE - 1):
        x = jax.device_put(matrix(place), NamedSharding(mesh, P("data")))
        for name, maximum in compiled(x).items():
            assert np.all(np.isnan(maximum)), name
