"""What `axis_name=` tells of each leaf, and what looks like a shard."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import AxisType

import optclip
from optclip.functional import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from tests.support import helpers
from tests.support.mapped import NORM, SPECS, TREE, mapped, refused, square_norm

AS_SPECS = {
    "specs": SPECS,
    "names": {"both": ("data", "model"), "split": "data", "whole": ()},
    "function": optclip.by_path(lambda path: SPECS[path]),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("told", list(AS_SPECS))
def test_axes_may_be_declared_leaf_by_leaf(told, check_vma):
    def clip(tree):
        return clip_by_global_norm(tree, 1.0, axis_name=AS_SPECS[told])

    clipped, norm = mapped(clip, (SPECS, P()), check_vma=check_vma)(TREE)
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for key, x in TREE.items():
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


def test_untyped_must_be_declared():
    """Nothing tells a whole leaf from a part of one, so that any norm could be wrong."""
    refused(
        lambda tree: global_norm(tree),
        ValueError,
        r"check_vma=False, the types do not say .* Give axis_name=\(\) if .*pmean\(grads,"
        r" \('data', 'model'\)\)",
        check_vma=False,
    )
    with pytest.raises(ValueError, match="Inside pmap, and shard_map with"):
        jax.pmap(global_norm)(TREE["split"])
    # Elements have no norm in common.
    clipped = mapped(
        lambda tree: clip_by_value(tree, lower=-1.0, upper=1.0), SPECS, check_vma=False
    )(TREE)
    np.testing.assert_array_equal(clipped["split"], np.ones(4))


SPANNING = {
    "learned of slices": lambda **told: optclip.clip_by(
        optclip.thresholds.ema(), over=optclip.axes(0), **told
    ),
    "learned of elements": lambda **told: optclip.clip_by(
        optclip.thresholds.ema_of_max(0.5), over="element", **told
    ),
    "skip": lambda **told: optclip.skip(
        optax.sgd(-1.0), max_norm=3.0, over="element", **told
    ),
    "proportional": lambda **told: optclip.clip_by(
        1.0, over="element", response="proportional", **told
    ),
    "detached": lambda **told: optclip.clip_by(
        1.0,
        over="element",
        response=optclip.responses.detached("proportional"),
        **told,
    ),
}


@pytest.mark.parametrize("name", SPANNING)
def test_untyped_and_in_common(name):
    """What all slices decide together cannot be known from those of one device."""
    kernel, specs = {"both": TREE["both"]}, {"both": SPECS["both"]}

    def update(told):
        tx = SPANNING[name](**told)
        return lambda tree: tx.update(tree, tx.init(tree))[0]

    def run(told, check_vma):
        step = mapped(update(told), specs, check_vma=check_vma, specs=specs)
        return step(kernel)["both"]

    for told in ({}, {"axis_name": specs}):
        with pytest.raises(ValueError, match=r"Leave check_vma on; or, if each device"):
            run(told, check_vma=False)
    expected = run({"axis_name": specs}, check_vma=True)
    alone = helpers.quick_jit(update({}))(kernel)["both"]
    np.testing.assert_allclose(expected, alone, rtol=1e-6)
    # Each device has whole gradients: as on one.
    whole = mapped(
        update({"axis_name": ()}), {"both": P()}, check_vma=False, specs={"both": P()}
    )
    np.testing.assert_allclose(whole(kernel)["both"], expected, rtol=1e-6)


def test_what_is_declared_counts_where_no_type_says():
    x = TREE["both"][:, 0]
    parts = jax.pmap(lambda x: global_norm(x, axis_name=()), axis_name="i")(x)
    np.testing.assert_allclose(parts, x, rtol=1e-6)
    whole = jax.pmap(lambda x: global_norm(x, axis_name="i"), axis_name="i")(x)
    np.testing.assert_allclose(whole, [square_norm(x)] * 4, rtol=1e-6)
    whole = jax.vmap(lambda x: global_norm(x, axis_name="i"), axis_name="i")(x)
    np.testing.assert_allclose(whole, [square_norm(x)] * 4, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(global_norm, axis_name="i")(x), x, rtol=1e-6)
    norms = mapped(
        lambda tree: global_norm(tree, axis_name=())[None],
        P(("data", "model")),
        check_vma=False,
    )(TREE)
    parts = [
        square_norm(TREE["both"][i, j], TREE["split"][i], TREE["whole"])
        for i in range(4)
        for j in range(2)
    ]
    np.testing.assert_allclose(norms, parts, rtol=1e-6)


def test_one_name_for_all_counts_whole_leaves_once():
    """Where types tell that a leaf is the same everywhere, it is not counted twice."""
    alike = {key: TREE[key] for key in ("split", "whole")}
    specs = {key: SPECS[key] for key in alike}
    norm = mapped(lambda t: global_norm(t, axis_name="data"), specs=specs)(alike)
    np.testing.assert_allclose(norm, square_norm(*alike.values()), rtol=1e-6)


def test_what_looks_like_a_shard_is_counted_so_unless_declared():
    """Gathered, pcast and not yet averaged: three ways to vary and be no shard."""
    whole = TREE["whole"]

    def gathered(x):
        return lax.all_gather(x, "data", tiled=True)

    def cast(x):
        del x
        return lax.pcast(jnp.asarray(whole), "data", to="varying")

    def unaveraged(x):
        # What each device has of a mean that is taken later.
        return 4 * x[0] * jnp.ones(2)

    for make, alone in (
        (gathered, square_norm(TREE["split"])),
        (cast, square_norm(whole)),
    ):
        seen = mapped(lambda x, make=make: global_norm(make(x)), specs=P("data"))
        np.testing.assert_allclose(seen(TREE["split"]), alone * 2, rtol=1e-6)
        told = mapped(
            lambda x, make=make: lax.pmean(global_norm(make(x), axis_name=()), "data"),
            specs=P("data"),
        )
        np.testing.assert_allclose(told(TREE["split"]), alone, rtol=1e-6)
    seen = mapped(lambda x: global_norm(unaveraged(x)), specs=P("data"))
    np.testing.assert_allclose(seen(TREE["split"]), 8 * np.sqrt(8), rtol=1e-6)
    averaged = mapped(
        lambda x: global_norm(lax.pmean(unaveraged(x), "data")), specs=P("data")
    )
    np.testing.assert_allclose(averaged(TREE["split"]), 8 * np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_slices_of_a_split_leaf(axis, check_vma):
    """Over the devices that a slice is on, and no others."""
    kernel = {"both": TREE["both"]}
    specs = {"both": SPECS["both"]}

    def clip(tree):
        tx = optclip.clip_by(3.0, over=optclip.axes(axis), axis_name=specs)
        clipped, state = tx.update(tree, tx.init(tree))
        return clipped, optclip.metrics(state)

    clipped, metrics = mapped(clip, (specs, P()), check_vma=check_vma, specs=specs)(
        kernel
    )
    norms = np.sqrt(np.sum(np.float64(TREE["both"]) ** 2, axis=axis, keepdims=True))
    factor = np.minimum(1, 3 / norms)
    assert np.any(factor < 1)
    np.testing.assert_allclose(clipped["both"], TREE["both"] * factor, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip/norm"], np.max(norms), rtol=1e-6)
    np.testing.assert_allclose(metrics["clip/coefficient"], np.min(factor), rtol=1e-6)
    np.testing.assert_allclose(metrics["clip/fraction"], np.mean(norms > 3), rtol=1e-6)


def test_an_expert_counts_once():
    """A group whose members live on different axes: experts, and what all share."""
    labels = {"both": "experts", "split": "experts", "whole": "shared"}

    def clip(tree):
        tx = optclip.clip_by_group_norm({"experts": 4.0, "shared": 1.0}, labels)
        clipped, state = tx.update(tree, tx.init(tree))
        return clipped, optclip.metrics(state)

    clipped, metrics = mapped(clip, (SPECS, P()))(TREE)
    experts = square_norm(TREE["both"], TREE["split"])
    np.testing.assert_allclose(metrics["clip/norm/experts"], experts, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip/norm/shared"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(clipped["whole"], TREE["whole"] / 5, rtol=1e-6)
    for key in ("both", "split"):
        np.testing.assert_allclose(clipped[key], TREE[key] * 4 / experts, rtol=1e-6)


def test_a_pipeline_whose_stages_hold_parts_of_the_tree():
    """Each stage has layers of its own, all stages what is before and after them."""
    mesh = jax.make_mesh((8,), ("stage",), axis_types=(AxisType.Auto,))
    layers = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    tree = {"layers": layers, "head": np.array([2.0, 1.0], np.float32)}
    specs = {"layers": P("stage"), "head": P()}

    def clip(tree):
        return clip_by_global_norm(tree, 1.0)

    step = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    clipped, norm = helpers.quick_jit(step)(tree)
    expected = square_norm(*tree.values())
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    np.testing.assert_allclose(clipped["layers"], layers / expected, rtol=1e-6)


COLUMNS = {"whole": P(None, "x"), "cut": P("x", None)}


def by_column(tree):
    return clip_by_norm(tree, 1.0, axis=0, axis_name=COLUMNS)


def by_leaf(tree):
    """Each device its part of one by itself, of the other all together."""
    return clip_by_norm(tree, 1.0, axis_name={"whole": (), "cut": "x"})


@pytest.mark.covering(
    clip=[by_column, by_leaf], scale=[0.0, 1e-30, 1e30], check_vma=[True, False]
)
def test_out_of_range_on_one_device(clip, scale, check_vma):
    """It must not wait alone, in the second pass, for what others send in no pass."""
    rng = np.random.default_rng(0)
    tree = {
        "whole": rng.normal(size=(16, 8)).astype(np.float32),
        "cut": rng.normal(size=(8, 16)).astype(np.float32),
    }
    tree["whole"][:, 2] *= scale
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    clipped = helpers.quick_jit(
        jax.shard_map(
            clip, mesh=mesh, in_specs=(COLUMNS,), out_specs=COLUMNS, check_vma=check_vma
        )
    )(tree)
    # A device has one column of the first: its part by itself is that column.
    axes = {"whole": 0, "cut": 0 if clip is by_column else None}
    for key, x in tree.items():
        norm = np.sqrt(np.sum(np.float64(x) ** 2, axis=axes[key], keepdims=True))
        assert np.any(norm > 1)
        np.testing.assert_allclose(
            clipped[key], x / np.maximum(norm, 1), rtol=1e-6, atol=1e-37
        )


def test_a_bad_slice_holds_back_the_memory_of_all():
    """On its own device and on the others: they keep one history."""
    spec = P(None, "model")
    rule = optclip.thresholds.ema(warmup=0)
    tx = optclip.clip_by_norm(rule, axis=0, axis_name=spec)

    def learned(tree):
        first, bad = tree
        _, state = tx.update(first, tx.init(first))
        _, after = tx.update(bad, state)
        return [s.clip_memory[0][0].norm for s in (state, after)]

    first = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    bad = 3 * first
    bad[0, 0] = np.nan
    kept, after = mapped(learned, spec, specs=(spec, spec))((first, bad))
    expected = np.linalg.norm(first, axis=0, keepdims=True)
    np.testing.assert_allclose(kept, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept, after)


def test_the_record_of_slices_spans_what_is_declared():
    """Where no type says that slices are sharded, of two leaves as of one."""
    tx = optclip.clip_by_norm(1.0, axis=1, axis_name=P("data"))
    tree = [np.arange(8.0, dtype=np.float32).reshape(8, 1)] * 2

    def norm(tree):
        record = tx.update(tree, tx.init(tree))[1].clip_record["clip"]
        return record.clip_norm[None], record.clip_clipped[None]

    out = P(("data", "model"))
    found = mapped(norm, (out, out), check_vma=False, specs=P("data"))(tree)
    np.testing.assert_array_equal(found, [[7.0] * 8, [1] * 8])


def test_what_is_declared_decides_whether_all_skip():
    tx = optclip.skip(
        optax.sgd(1.0), max_norm=5.0, over=optclip.axes(0), axis_name=P(None, "i")
    )
    tree = [jnp.stack([jnp.ones((4, 3)) * k for k in (0.1, 1, 10, 0.1)])] * 2
    state = tx.init([x[0] for x in tree])
    found = jax.vmap(lambda t: tx.update(t, state)[0], axis_name="i")(tree)
    assert not np.any(found)


def test_the_record_of_many_elements_on_each_device():
    tx = optclip.clip_by_value(1.5)
    x = np.random.default_rng(0).normal(size=(8, 70_000)).astype(np.float32)

    def record(x):
        return optclip.metrics(tx.update(x, tx.init(x))[1])

    found = mapped(record, specs=P(("data", "model")))(x)
    assert found["clip/norm"] == np.max(np.abs(x))
    np.testing.assert_allclose(found["clip/fraction"], np.mean(np.abs(x) > 1.5))
