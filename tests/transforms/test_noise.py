"""Norms below 1e-6 of the largest one are not recorded as the most clipped norm."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import recipes, thresholds

STEPS = 20
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
    "leaf": recipes.adagc(max_norm=math.inf, warmup=3),
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


def run(tx, tree):
    return np.asarray(jax.jit(lambda tree: chosen(tx, tree))(tree))


@pytest.mark.parametrize("name", CLIPS)
def test_record_is_the_same_with_a_leaf_of_noise_in_any_order(name):
    expected = run(CLIPS[name], KERNELS)
    assert np.mean(expected[2] < 1) > 0.5
    reverse = {f"{9 - i}": x for i, x in enumerate((NOISE | KERNELS).values())}
    for tree in (KERNELS | NOISE, reverse):
        np.testing.assert_allclose(run(CLIPS[name], tree), expected, rtol=1e-6)


def test_noise_is_clipped_and_counted():
    tx = optclip.clip_by_norm(thresholds.ema(1.0, warmup=0, max_norm=math.inf))
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
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    "shard_map": AxisType.Auto,
}


# In `shard_map`, the slices of a device need `axis_name`.
CELLS = {*itertools.product(CLIPS, MESHES)} - {("slice", "shard_map")}


@pytest.mark.parametrize(("name", "kind"), sorted(CELLS))
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
