"""`axis_name=` and the types of leaves decide which devices share a norm."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import _thresholds

# Private import: coverage is measured with a JAX that lacks the older types.
from optclip._arrays import _axis_names
from optclip.functional import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from tests.support import helpers
from tests.support.mapped import NORM, SPECS, TREE, mapped, mesh_of, square_norm

FORMS = {
    "types": None,
    "specs": SPECS,
    "names": {"both": ("data", "model"), "split": "data", "whole": ()},
    "function": optclip.by_path(lambda path: SPECS[path]),
}


@pytest.mark.covering(
    form=list(FORMS),
    check_vma=[True, False],
    where=lambda form, check_vma: check_vma or form != "types",
)
def test_global_norm_split_leaves_spans_their_axes(form, check_vma):
    """The leaf `whole` counts once and stays replicated, as `out_specs` checks."""

    def clip(tree):
        return clip_by_global_norm(tree, 1.0, axis_name=FORMS[form])

    clipped, norm = mapped(clip, (SPECS, P()), check_vma=check_vma)(TREE)
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for key, x in TREE.items():
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


@pytest.mark.parametrize(
    ("over", "axis_name", "spans"),
    [
        (jax.pmap, (), False),
        (jax.pmap, "i", True),
        (jax.vmap, None, False),
        (jax.vmap, "i", True),
    ],
)
def test_axis_name_untyped_map_is_followed(over, axis_name, spans):
    x = TREE["both"][:, 0]
    norms = over(lambda x: global_norm(x, axis_name=axis_name), axis_name="i")(x)
    expected = [square_norm(x)] * 4 if spans else x
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


def test_clip_pmap_over_one_device_needs_no_axis_name():
    """A single device has whole leaves, so types need not specify it."""
    tx = optclip.clip_by_norm(optclip.thresholds.ema(max_norm=2.0), axis=0)
    tree = {"kernel": TREE["both"][None]}

    def step(tree):
        return tx.update(tree, tx.init(tree))[0]

    clipped = jax.pmap(step)(tree)["kernel"][0]
    expected = 2 * TREE["both"] / square_norm(TREE["both"])
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def test_clip_by_value_untyped_needs_no_axis_name():
    """Elements share no norm."""
    clipped = mapped(
        lambda tree: clip_by_value(tree, lower=-1.0, upper=1.0), SPECS, check_vma=False
    )(TREE)
    np.testing.assert_array_equal(clipped["split"], np.ones(4))


SPANNING = {
    "learned of slices": lambda **options: optclip.clip_by(
        optclip.thresholds.ema(), over=optclip.axes(0), **options
    ),
    "learned of elements": lambda **options: optclip.clip_by(
        _thresholds.ema_of_max(0.5), over="element", **options
    ),
    "skip": lambda **options: optclip.skip(
        optax.sgd(-1.0), max_norm=3.0, over="element", **options
    ),
    "proportional": lambda **options: optclip.clip_by(
        1.0, over="element", response="proportional", **options
    ),
    "detached": lambda **options: optclip.clip_by(
        1.0,
        over="element",
        response=optclip.responses.detached("proportional"),
        **options,
    ),
}


@pytest.mark.parametrize("name", SPANNING)
def test_spanning_clip_untyped_requires_whole_gradients(name):
    """A decision over all slices cannot be computed from one device's slices."""
    spec = SPECS["both"]

    def update(**options):
        tx = SPANNING[name](**options)
        return lambda x: tx.update(x, tx.init(x))[0]

    for options in ({}, {"axis_name": spec}):
        step = mapped(update(**options), spec, check_vma=False, specs=spec)
        with pytest.raises(ValueError, match="Use check_vma=True. If each device"):
            step(TREE["both"])
    expected = helpers.quick_jit(update())(TREE["both"])
    split = mapped(update(axis_name=spec), spec, specs=spec)
    whole = mapped(update(axis_name=()), P(), check_vma=False, specs=P())
    for step in (split, whole):
        np.testing.assert_allclose(step(TREE["both"]), expected, rtol=1e-6)


def test_global_norm_varying_leaf_is_a_shard_unless_declared():
    """Also where it is gathered, cast, or the term of a mean that is taken later."""

    def norms(x):
        leaves = {
            "gathered": lax.all_gather(x, "data", tiled=True),
            "cast": lax.pcast(jnp.asarray(TREE["whole"]), "data", to="varying"),
            "unaveraged": x,
        }
        shards = jax.tree.map(global_norm, leaves)
        alone = jax.tree.map(lambda x: global_norm(x, axis_name=()), leaves)
        return shards, lax.pmean(alone, "data"), global_norm(lax.pmean(x, "data"))

    shards, whole, averaged = mapped(norms, specs=P("data"))(TREE["split"])
    expected = {
        "gathered": square_norm(TREE["split"]),
        "cast": square_norm(TREE["whole"]),
        "unaveraged": 2.0,
    }
    for key, norm in expected.items():
        np.testing.assert_allclose(shards[key], 2 * norm, rtol=1e-6)
        np.testing.assert_allclose(whole[key], norm, rtol=1e-6)
    np.testing.assert_allclose(averaged, 2.0, rtol=1e-6)


COLUMNS = {"whole": P(None, "x"), "cut": P("x", None)}


def by_column(tree):
    return clip_by_norm(tree, 1.0, axis=0, axis_name=COLUMNS)


def by_leaf(tree):
    """Each device clips its part of `whole` alone; all clip `cut` together."""
    return clip_by_norm(tree, 1.0, axis_name={"whole": (), "cut": "x"})


@functools.cache
def mapped_over_columns(clip, check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return helpers.quick_jit(
        jax.shard_map(
            clip, mesh=mesh, in_specs=(COLUMNS,), out_specs=COLUMNS, check_vma=check_vma
        )
    )


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("clip", [by_column, by_leaf])
def test_norm_out_of_range_on_one_device_does_not_deadlock(clip, check_vma, scale):
    """A device in the second pass must not wait for devices that skip it."""
    rng = np.random.default_rng(0)
    tree = {
        "whole": rng.normal(size=(16, 8)).astype(np.float32),
        "cut": rng.normal(size=(8, 16)).astype(np.float32),
    }
    tree["whole"][:, 2] *= scale
    clipped = mapped_over_columns(clip, check_vma)(tree)
    # Each device has one column of `whole`, so that its part is that column.
    axes = {"whole": 0, "cut": 0 if clip is by_column else None}
    for key, x in tree.items():
        norm = np.sqrt(np.sum(np.float64(x) ** 2, axis=axes[key], keepdims=True))
        assert np.any(norm > 1)
        np.testing.assert_allclose(
            clipped[key], x / np.maximum(norm, 1), rtol=1e-6, atol=1e-37
        )


def test_record_of_many_elements_spans_devices():
    tx = optclip.clip_by_value(1.5)
    x = np.random.default_rng(0).normal(size=(8, 70_000)).astype(np.float32)

    def record(x):
        return optclip.metrics(tx.update(x, tx.init(x))[1])

    metrics = mapped(record, specs=P(("data", "model")))(x)
    assert metrics["clip/norm"] == np.max(np.abs(x))
    np.testing.assert_allclose(metrics["clip/fraction"], np.mean(np.abs(x) > 1.5))


@pytest.mark.parametrize("clip", [optclip.clip_by_global_norm, optclip.clip_by_norm])
def test_axis_name_empty_clips_own_part_and_records_largest(clip):
    """The record is the same on all devices, as `out_specs` checks."""
    tx = clip(2.0, axis_name=())

    def step(x):
        clipped, state = tx.update(x, tx.init(x))
        return clipped, optclip.metrics(state)

    spec = P(("data", "model"))
    norms = np.arange(1.0, 9.0, dtype=np.float32)
    clipped, metrics = mapped(step, (spec, P()), specs=spec)(norms)
    np.testing.assert_allclose(clipped, np.minimum(norms, 2.0), rtol=1e-6)
    assert metrics["clip/norm"] == 8.0
    assert metrics["clip/coefficient"] == 0.25
    assert metrics["clip/rate"] == 1.0


def test_axis_name_empty_takes_threshold_of_each_device():
    """One name counts a leaf once that is whole on its devices."""
    limits = np.array([1.0, 2.0, 0.5, 100.0], np.float32)

    def clip(tree):
        limit = jnp.asarray(limits)[lax.axis_index("data")]
        both = {key: tree[key] for key in ("split", "whole")}
        clipped, _ = clip_by_global_norm(tree["split"], limit, axis_name=())
        return clipped, global_norm(both, axis_name="data")

    clipped, norm = mapped(clip, (P("data"), P()))(TREE)
    np.testing.assert_allclose(clipped, np.minimum(2.0, limits), rtol=1e-6)
    expected = square_norm(TREE["split"], TREE["whole"])
    np.testing.assert_allclose(norm, expected, rtol=1e-6)


def test_varying_type_of_older_jax_is_read(monkeypatch):
    """Before JAX 0.10.0, types have `vma` but no unreduced axes."""
    # The version is read at import, before a test could replace it.
    monkeypatch.setattr(_axis_names, "IS_OLD", True)
    for vma in (frozenset({"data"}), frozenset(), None):
        kind = types.SimpleNamespace(vma=vma)
        assert _axis_names.varying(kind) == (vma or frozenset())


# Calls over mapped axes that cannot be correct raise, with advice.


def by_device():
    return lax.axis_index("model") + 1.0


PASSED = optclip.clip_by_global_norm(1.0, use_norm="grad_norm")
EMA = optclip.thresholds.ema()
ROWS = optclip.clip_by(EMA, over=optclip.axes(-1), axis_name=SPECS)


# No type distinguishes a whole leaf from a shard, so any norm could be wrong.
UNTYPED = (
    r"check_vma=False, array types do not specify .* Pass axis_name=\(\) if"
    r" .*pmean\(grads, \('data', 'model'\)\)"
)
MAXIMUM = r"jnp.where\(jax.lax.psum\(.*, jnp.nan, jax.lax.pmax\(\w+, \('model',\)\)\)"
VARIES = rf"varies over the mesh axes \('model',\).* {MAXIMUM}"
REJECTED = {
    "unknown axis": (
        lambda tree: global_norm(tree, axis_name="dta"),
        r"got 'dta' \(str\). The mesh axes mapped here are \('data', 'model'\)",
    ),
    "another tree": (
        lambda tree: global_norm(tree, axis_name={"both": P("data"), "hole": P()}),
        "`axis_name` must be a prefix of .* Missing: .*'whole'.* Unexpected: 'hole'",
    ),
    "long spec": (
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P("data", None, "model")),
        "at most one entry per dimension of a leaf, got 3 in",
    ),
    "unconstrained spec": (
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P(P.UNCONSTRAINED)),
        "UNCONSTRAINED, which does not specify",
    ),
    "undeclared slices": (
        lambda tree: clip_by_norm(tree, 1.0, axis=0),
        "does not specify the split dimension",
    ),
    "threshold of the tree": (
        lambda tree: clip_by_global_norm(tree, by_device()),
        VARIES,
    ),
    "threshold of leaves": (lambda tree: clip_by_norm(tree, by_device()), VARIES),
    "threshold of elements": (
        lambda tree: clip_by_value(tree, lower=-1.0, upper=by_device()),
        VARIES,
    ),
    "eps": (
        lambda tree: clip_by_global_norm(tree, 1.0, eps=by_device()),
        rf"`eps` {VARIES}",
    ),
    "state of whole leaves": (
        lambda tree: ROWS.update(tree, ROWS.init(TREE)),
        "its own memory in the state, .* Call init inside the same shard_map",
    ),
    "norm of the user": (
        lambda tree: PASSED.update(tree, PASSED.init(tree), grad_norm=by_device())[0],
        rf"`grad_norm` {VARIES}",
    ),
}


CALLS = {
    "untyped": (mapped(global_norm, check_vma=False), UNTYPED),
    "pmap": (jax.pmap(global_norm), "Inside pmap, or shard_map with"),
} | {name: (mapped(function), words) for name, (function, words) in REJECTED.items()}


@pytest.mark.parametrize("case", CALLS)
def test_mapped_call_ambiguous_over_devices_raises(case):
    call, words = CALLS[case]
    with pytest.raises(ValueError, match=words):
        call({"both": TREE["both"][:, :1]} if case == "pmap" else TREE)


def test_clip_unreduced_gradient_raises():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = np.ones((8, 4), np.float32)

    def clip(x):
        gradient = jnp.einsum("bi,bj->ij", x, x, out_sharding=P(unreduced={"data"}))
        return clip_by_global_norm({"kernel": gradient}, 1.0)

    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"'kernel' is unreduced .*'data'"):
            jax.eval_shape(clip, x)


# `shard_map` with other JAX features: partly manual, nested, vmap and grad.


def only(axis):
    """Reduce the specs to `axis`, for a map over only that axis."""
    return {
        key: P(*(name if name == axis else None for name in spec))
        for key, spec in SPECS.items()
    }


@pytest.mark.parametrize(
    ("axis", "kind"), [("data", AxisType.Auto), ("model", AxisType.Explicit)], ids=str
)
def test_global_norm_partly_manual_mesh_spans_all_axes(axis, kind):
    mesh, specs = mesh_of(kind), only(axis)
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        step = jax.shard_map(
            lambda tree: clip_by_global_norm(tree, 1.0),
            in_specs=(specs,),
            out_specs=(specs, P()),
            axis_names={axis},
        )
        clipped, norm = helpers.quick_jit(step)(jax.device_put(TREE, places))
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for key, x in TREE.items():
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


def test_global_norm_nested_maps_spans_both_axes():
    inner = jax.shard_map(
        global_norm, in_specs=(only("model"),), out_specs=P(), axis_names={"model"}
    )
    outer = jax.shard_map(
        inner,
        mesh=mesh_of(),
        in_specs=(only("data"),),
        out_specs=P(),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh_of()):
        np.testing.assert_allclose(helpers.quick_jit(outer)(TREE), NORM, rtol=1e-6)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="jax 0.8.3 has no psum in such a vmap"
)
def test_global_norm_vmap_in_map_spans_devices_per_example():
    def norms(tree):
        scales = jnp.array([1.0, 2.0])
        return jax.vmap(lambda s: global_norm(jax.tree.map(lambda x: s * x, tree)))(
            scales
        )

    np.testing.assert_allclose(mapped(norms)(TREE), [NORM, 2 * NORM], rtol=1e-6)


def test_clip_derivative_in_map_goes_through_whole_norm():
    def gradients(total):
        def loss(tree, ord):
            clipped, norm = clip_by_global_norm(tree, 2.0, ord=ord)
            cubes = {key: jnp.sum(x**3) for key, x in clipped.items()}
            return norm + sum(total(key, cube) for key, cube in cubes.items())

        return lambda tree: [jax.grad(loss)(tree, ord) for ord in (2, 3, np.inf)]

    def over_devices(key, cube):
        axes = {"both": ("data", "model"), "split": "data", "whole": ()}[key]
        return jax.lax.psum(cube, axes) if axes else cube

    found = mapped(gradients(over_devices), [SPECS] * 3)(TREE)
    expected = helpers.quick_jit(gradients(lambda key, cube: cube))(TREE)
    assert all(np.any(x) for x in jax.tree.leaves(expected))
    chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=1e-6)
