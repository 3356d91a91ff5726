"""The record in a state: the last step without noise, and counts over all steps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import recipes, thresholds
from tests.support import covering, helpers

PAIR = np.float32([3.0, 4.0])


def after(tx, *trees):
    update, state = helpers.quick_jit(tx.update), tx.init(trees[0])
    for tree in trees:
        _, state = update(tree, state, tree)
    return optclip.metrics(state)


@pytest.mark.parametrize("record", [True, "leaves"])
def test_record_before_the_first_step_is_unclipped(record):
    state = optclip.clip_by_norm(1.0, record=record).init({"a": PAIR})
    for key, number in optclip.metrics(state).items():
        assert number == ("coefficient" in key), key


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_record_counts_clipped_and_nonfinite_steps(policy):
    """A zeroed step has the coefficient 0, and counts as not finite, not as clipped."""
    tx = optclip.clip_by_global_norm(2.0, nonfinite=policy)
    bad, worse = np.float32([np.nan, 1]), np.float32([np.inf, 1])
    small = np.float32([0.3, 0.4])
    found = after(tx, PAIR, PAIR, small, bad, PAIR, small, worse)
    assert found["clip/nonfinite"] == 2
    np.testing.assert_allclose(found["clip/rate"], 3 / 7, rtol=1e-6)
    if policy == "zero":
        assert found["clip/coefficient"] == 0.0


def test_record_of_more_elements_than_int32_counts_is_traced():
    tree = {key: jax.ShapeDtypeStruct((2**30,), jnp.bfloat16) for key in "abc"}
    for tx in (optclip.clip_by_value(1.0), optclip.clip_by_norm(1.0, axis=())):
        out, _ = jax.eval_shape(tx.update, tree, jax.eval_shape(tx.init, tree), tree)
        helpers.assert_same_types(out, tree)


def test_record_counts_saturate():
    tx = optclip.clip_by_global_norm(1.0, nonfinite="zero")
    last = jnp.int32(2**31 - 1)
    for value, field in ((3.0, "clip_clipped"), (np.nan, "clip_nonfinite")):
        state = tx.init(PAIR)
        record = state.clip_record["clip"]._replace(**{field: last})
        state = state._replace(clip_record={"clip": record})
        _, state = tx.update(np.full(2, value, np.float32), state)
        assert getattr(state.clip_record["clip"], field) == last


def oracle(tree, axis, limit):
    """Return the record of a clip of slices or, for (), of elements, in float64."""
    wide = [np.asarray(x, np.float64) for x in tree]
    norms = [np.ravel(np.sqrt(np.sum(x**2, axis)) if axis else np.abs(x)) for x in wide]
    norms = np.concatenate(norms)
    return {
        "clip/norm": norms.max(),
        "clip/threshold": limit,
        "clip/coefficient": np.min(limit / np.maximum(norms, limit)),
        "clip/fraction": np.mean(norms > limit),
    }


@pytest.mark.parametrize("axis", [(), (0,), (1,)])
def test_record_of_slices_and_elements_spans_small_and_large_leaves(axis):
    """The norms of a leaf with 70,000 or more are reduced separately."""
    shapes = [(5, 7), (70_000, 2), (3, 4), (1, 70_000)]
    rng = np.random.default_rng(0)
    tree = [np.float32(rng.normal(size=shape)) for shape in shapes]
    make = optclip.clip_by_value if not axis else optclip.clip_by_norm
    found = after(make(1.5, **({"axis": axis} if axis else {})), tree)
    for key, value in oracle(tree, axis, 1.5).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)


@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
@pytest.mark.parametrize("bounds", [(-1.5, 1.5), (-1.0, 2.5), (-1.0, 5.0), (0.5, 2.0)])
def test_record_of_bounds_of_whole_leaves_has_the_most_exceeded(bounds, bad):
    """The first two leaves are reduced together, the third in several blocks.

    An unclipped element is not compared with the bound on the other side.
    """
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (5, 7), (70_001, 2), (3000, 3)]
    tree = [np.float32(rng.normal(size=shape)) for shape in shapes]
    if bad is not None:
        tree[2][70_000, 1] = bad
    lower, upper = bounds
    limits = {"limit": upper} if lower == -upper else {"lower": lower, "upper": upper}
    found = after(optclip.clip_by_value(**limits), tree)
    x = np.concatenate([leaf.ravel() for leaf in tree]).astype(np.float64)
    size, bound = np.abs(x), np.abs(np.where(x < 0, lower, upper))
    at = np.argmax(size / bound)  # NaN is the largest.
    goal = np.abs(np.clip(x, lower, upper))
    clipped = np.isfinite(x) & (goal != size)
    wanted = [size[at], bound[at], (goal / size)[at], np.mean(clipped), bad is not None]
    fields = ("norm", "threshold", "coefficient", "fraction", "nonfinite")
    record = [found[f"clip/{field}"] for field in fields]
    if bad is np.nan:
        record[1] = wanted[1] = 0  # A NaN is on no side.
    np.testing.assert_allclose(record, wanted, rtol=1e-5)
    assert np.sum(clipped) > 1000


LIMITS = {
    "leaf": ((), ()),
    "axis": ((5, 1), (70_000, 1)),
    "elements": ((3, 4), (2, 70_000)),
}


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("bad", [None, np.nan])
def test_record_of_several_thresholds_has_most_exceeded_norm(kind, bad):
    """Noise below a tiny threshold is not combined with another leaf's large norm."""
    rng = np.random.default_rng(3)
    shapes = [(5, 2), (70_000, 2)] if kind == "axis" else [(3, 4), (2, 70_000)]
    tree = [np.float32(rng.normal(size=shape)) for shape in shapes]
    limits = [
        np.float32(rng.uniform(1e-2, 9, shape) * scale)
        for shape, scale in zip(LIMITS[kind], (1e-9, 3.0), strict=True)
    ]
    tree[0] *= np.float32(1e-9)
    if bad is not None:
        tree[1][1, 1] = bad
    axis = {"leaf": None, "axis": 1, "elements": ()}[kind]
    over = {"leaf": "leaf", "axis": optclip.axes(1), "elements": "element"}[kind]
    found = after(optclip.clip_by(limits, over=over), tree)
    norms = [np.sqrt(np.sum(np.float64(x) ** 2, axis, keepdims=True)) for x in tree]
    pairs = [np.broadcast_arrays(*p) for p in zip(norms, limits, strict=True)]
    norm, limit = (
        np.concatenate([x.ravel() for x in y]) for y in zip(*pairs, strict=True)
    )
    at = np.argmax(np.where(np.isfinite(norm), norm / limit, np.inf))
    assert limit.min() < limit[at]
    np.testing.assert_allclose(found["clip/norm"], norm[at], rtol=1e-5)
    np.testing.assert_allclose(found["clip/threshold"], limit[at], rtol=1e-5)
    expected = limit[at] / max(norm[at], limit[at])
    np.testing.assert_allclose(found["clip/coefficient"], expected, rtol=1e-5)


def test_record_of_elements_spans_two_dtypes():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        tree = [rng.normal(size=80_000).astype(d) for d in ("float32", "float64")]
        largest = max(float(np.max(np.abs(x))) for x in tree)
        for bounds in ({"limit": 1.5}, {"lower": -1.5, "upper": 1.5}):
            found = after(optclip.clip_by_value(**bounds), tree)
            np.testing.assert_allclose(found["clip/norm"], largest, rtol=1e-6)
            assert 0.1 < found["clip/fraction"] < 0.3


def test_record_of_zero_leaf_is_unclipped():
    """A rule's threshold of it is 0, too, with a memory or without one."""
    tree = {"a": 0 * PAIR, "b": PAIR, "c": PAIR[:0]}
    for rule in (thresholds.quantile(0.5, window=4), thresholds.current()):
        found = after(optclip.clip_by_norm(rule, record="leaves"), tree, tree)
        assert found["clip/threshold/a"] == 0
        for leaf in "abc":
            assert found[f"clip/coefficient/{leaf}"] == 1
            assert found[f"clip/rate/{leaf}"] == 0
    found = after(optclip.clip_by_norm(0.0, record="leaves"), tree)
    assert (found["clip/rate/a"], found["clip/rate/b"]) == (0, 1)


def test_record_of_nan_threshold_has_nan_coefficient():
    tx = optclip.clip_by_global_norm(lambda step: jnp.nan)
    assert np.isnan(after(tx, 0 * PAIR)["clip/coefficient"])


def test_record_of_infinite_coefficient_is_as_applied(run):
    tx = optclip.clip_by(1.0, response=lambda norm, limit: norm * jnp.inf)
    updates = [PAIR * np.float32([1, -1]), np.ones(2, np.float32)]
    clipped, state = run(tx.update)(updates, tx.init(updates))
    np.testing.assert_array_equal(clipped[0], [np.inf, -np.inf])
    np.testing.assert_array_equal(clipped[1], [np.inf, np.inf])
    assert optclip.metrics(state)["clip/coefficient"] == np.inf


def test_record_of_leaves_with_equal_paths_has_one_name_per_leaf():
    tree = {"a/b": np.array([3.0]), "a": {"b": np.array([4.0]), "b_2": np.ones(1)}}
    found = after(optclip.clip_by_norm(1.0, record="leaves"), tree)
    leaf_norms = {k: v for k, v in found.items() if k.startswith("clip/norm/")}
    assert sorted(leaf_norms.values()) == [1.0, 3.0, 4.0]
    assert leaf_norms["clip/norm/a/b"] == 4.0
    assert leaf_norms["clip/norm/a/b_3"] == 3.0


# Norms below 1e-6 of the largest one are not recorded as the most clipped norm.

STEPS = 10
# 70,000 norms of slices or elements are reduced in rows, before those of other leaves.
SHAPES = {"small": (8, 16), "large": (70_000, 1)}


def lognormal(scales, shapes, seed):
    """Return leaves of these sizes over several steps."""
    rng = np.random.default_rng(seed)
    return {
        f"{name} {scale}": np.float32(
            scale * rng.lognormal(size=(STEPS, *SHAPES[name]))
        )
        for scale, name in zip(scales, shapes, strict=True)
    }


KERNELS = lognormal([1, 0.1, 0.01, 1.5], ["small", "small", "small", "large"], 0)
NOISE = lognormal([1e-9, 2e-9], ["small", "large"], 1)
CLIPS = {
    "leaf": recipes.adagc(max_norm=None, warmup=3),
    "window": optclip.clip_by_norm(thresholds.quantile(0.5, 8)),
    "slice": optclip.clip_by(thresholds.quantile(0.5, 4), over=optclip.axes(0)),
    "element": optclip.clip_by(thresholds.quantile(0.5, 4), over="element"),
}


def chosen(tx, tree):
    """Return the norm, threshold and coefficient of each step."""

    def step(state, updates):
        state = tx.update(updates, state, updates)[1]
        (record,) = state.clip_record.values()
        return state, jnp.stack(record[:3])

    first = jax.tree.map(lambda x: x[0], tree)
    return jax.lax.scan(step, tx.init(first), tree)[1].T


@functools.cache
def compiled(tx):
    return jax.jit(functools.partial(chosen, tx))


def run(tx, tree):
    return np.asarray(compiled(tx)(tree))


@pytest.mark.parametrize("name", CLIPS)
def test_record_is_the_same_with_a_leaf_of_noise_in_any_order(name):
    expected = run(CLIPS[name], KERNELS)
    assert np.mean(expected[2] < 1) > 0.5
    reverse = {f"{9 - i}": x for i, x in enumerate((NOISE | KERNELS).values())}
    for tree in (KERNELS | NOISE, reverse):
        np.testing.assert_allclose(run(CLIPS[name], tree), expected, rtol=1e-6)


def test_noise_is_clipped_and_counted():
    tx = optclip.clip_by_norm(thresholds.ema(1.0, warmup=0, max_norm=None))
    trees = [{"a": np.full(2, x), "b": np.ones(2)} for x in (1e-9, 1e-8)]
    state = tx.init(trees[0])
    for tree in trees:
        out, state = tx.update(tree, state)
    np.testing.assert_allclose(out["a"], 1e-9, rtol=1e-5)
    found = optclip.metrics(state)
    assert found["clip/fraction"] == 0.5
    assert found["clip/clipped"] == 1
    np.testing.assert_allclose(found["clip/norm"], math.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("leaf", ["small 1", "small 0.01", "small 1e-09"])
def test_record_keeps_norm_that_is_not_finite(leaf, bad):
    tree = jax.tree.map(lambda x: x.copy(), KERNELS | NOISE)
    tree[leaf][-1, 0] = bad
    for name in ("leaf", "slice"):
        norm, _, coefficient = run(CLIPS[name], tree)[:, -1]
        np.testing.assert_equal(norm, bad)
        assert coefficient != 1


MESHES = {
    "explicit": AxisType.Explicit,
    "shard_map": AxisType.Auto,
    "auto": AxisType.Auto,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for i, name in enumerate(CLIPS)
        for kind in covering.rotated([*MESHES], i)
        # There the slices of a device need `axis_name`.
        if (name, kind) != ("slice", "shard_map")
    ],
)
def test_record_is_the_same_on_8_devices(name, kind):
    tree = {key: x[:, :8] for key, x in (KERNELS | NOISE).items()}
    spec = P(None, "data")
    steps = functools.partial(chosen, CLIPS[name])
    if kind == "shard_map":
        steps = jax.shard_map(steps, in_specs=spec, out_specs=P())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(MESHES[kind],))
    with jax.set_mesh(mesh):
        split = jax.device_put(tree, NamedSharding(mesh, spec))
        found = jax.jit(steps)(split)
    np.testing.assert_allclose(found, run(CLIPS[name], tree), rtol=1e-5)
