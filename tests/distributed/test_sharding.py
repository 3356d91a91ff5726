"""Sharded arrays under jit and eagerly, many leaves, sparse leaves, moved states."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from optclip.functional import clip_by_average_norm, clip_by_global_norm, clip_by_value
from tests.support import carried, covering, helpers, meshes


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [(AxisType.Auto, 8, 300), (AxisType.Explicit, 8192, 12)],
    ids=str,
)
def test_global_norm_collectives_do_not_grow_with_leaves(kind, size, most):
    """Nor are small sharded leaves gathered.

    On TPU, hundreds are too many for one all-reduce, so that pairs are added first.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split = NamedSharding(mesh, P("data"))
    counts = []
    for number in (2, most):
        tree = [jax.device_put(np.ones(size, np.float32), split)] * number
        clip = helpers.quick_jit(lambda tree: clip_by_global_norm(tree, 1.0))
        compiled = clip.lower(tree).compile()
        assert "all-gather" not in compiled.as_text()
        counts.append(compiled.as_text().count(" all-reduce("))
        np.testing.assert_allclose(compiled(tree)[1], (number * size) ** 0.5, rtol=1e-6)
    assert counts[0] == counts[1] <= 2


QUANTILE = optclip.thresholds.quantile(0.9, 8)
# What is added to `skip(chain(clip, optimizer))`: options of the clip, and of `skip`.
LINES = {
    "fixed": ({}, {}),
    "leaves": ({"record": "leaves"}, {}),
    "learned": (
        {"max_norm": QUANTILE, "record": "leaves"},
        {"max_norm": optclip.thresholds.scaled(QUANTILE, 3.0), "record": "leaves"},
    ),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_skipping_line_has_all_reduces_of_its_clip(line, tensor_parallel):
    """The gradients are computed. Half of the all-reduces are for overflow."""
    names = ("data", "model") if tensor_parallel else ("data",)
    kernel = P(*names)
    of_clip, of_skip = LINES[line]

    def count(wrap, **options):
        clip = optclip.clip_by_global_norm(**{"max_norm": 1.0, **options})
        tx = wrap(optax.chain(clip, optax.sgd(0.1, momentum=0.9)))

        def step(tree):
            scaled = jax.tree.map(lambda x: x / 2, tree)
            return tx.update(scaled, tx.init(tree), tree)

        mesh = meshes.mesh_of("2x4" if tensor_parallel else "8", "auto")
        specs = {"embed": P("data"), "kernel": kernel, "scale": P()}
        tree = {
            key: jax.device_put(x, NamedSharding(mesh, specs[key]))
            for key, x in {
                "embed": np.ones((8, 2), np.float32),
                "kernel": np.ones((8, 4), np.float32),
                "scale": np.ones(2, np.float32),
            }.items()
        }
        text = helpers.quick_jit(step).lower(tree).compile().as_text()
        assert "all-gather" not in text
        return text.count(" all-reduce(")

    clip_alone = count(lambda tx: tx)
    assert 0 < clip_alone <= 2 * len(names)
    skipping = count(lambda tx: optclip.skip(tx, **of_skip), **of_clip)
    assert skipping == clip_alone


LIMITS = np.arange(8, dtype=np.float32) / 2


def assert_same_on_explicit_axes(function, x, spec):
    """Also for NumPy constants of a compiled function, which have no mesh."""
    expected = helpers.quick_jit(function)(x)
    assert helpers.differs(expected[0], x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, spec))
        found = helpers.quick_jit(function)(split)
        assert jax.typeof(found[0]).sharding == jax.typeof(split).sharding
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_array_thresholds_on_explicit_axes_match_one_device():
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    tx = optclip.clip_by_value(np.where(LIMITS == 2, np.inf, 4 * LIMITS))

    def clip(x):
        bounded = clip_by_value(x, -LIMITS, 6 * LIMITS)
        bounded, state = tx.update(bounded, tx.init(bounded))
        clipped = optclip.functional.clip_by_norm(bounded, LIMITS[None], axis=0)
        return clipped, optclip.metrics(state)

    assert_same_on_explicit_axes(clip, x, P(None, "data"))


@pytest.mark.parametrize(
    ("rule", "over"),
    [
        (rule, over)
        for i, rule in enumerate(
            (
                optclip.thresholds.quantile(0.5, window=3),
                optclip.thresholds.mean_plus_std(1.0, window=3, warmup=2),
            )
        )
        for over in covering.rotated([optclip.units(), "element"], i)
    ],
)
def test_window_of_split_norms_on_explicit_axes_matches_one_device(rule, over):
    tx = optclip.clip_by(rule, over=over)

    def run(x):
        state = tx.init(x)
        for size in (1.0, 3.0, 9.0):
            clipped, state = tx.update(x * size, state)
        return clipped, optclip.metrics(state)

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    assert_same_on_explicit_axes(run, x, P(None, "data"))


def embedding():
    """Return a sparse gradient with 8 of 24 rows, and a dense leaf."""
    rows = np.arange(16, dtype=np.float32).reshape(8, 2) + 1
    indices = np.array([[3], [0], [7], [11], [5], [20], [2], [9]])
    table = BCOO((jnp.asarray(rows), jnp.asarray(indices)), shape=(24, 2))
    return {"table": table, "bias": jnp.asarray(np.full(2, 9, np.float32))}


def _of(make, **options):
    """Build clipping at 2 with further options."""
    return lambda **more: make(2.0, **options, **more)


BY_ROW = {"table": P("data"), "bias": P()}
SPARSE = [
    meshes.Clip("tree", _of(optclip.clip_by_global_norm), ("sums",)),
    meshes.Clip("leaf", _of(optclip.clip_by_norm), ("sums",)),
    meshes.Clip(
        "group",
        _of(optclip.clip_by_group_norm, groups={"table": "a", "bias": "b"}),
        ("sums",),
    ),
    meshes.Clip("value", _of(optclip.clip_by_value), ("parts",)),
    meshes.Clip("rows", _of(optclip.clip_by_norm, axis=-1), ("parts",), True),
    meshes.Clip("strict", _of(optclip.clip_by_norm, strict=True), ("sums",)),
]


def dense(tree):
    """Convert leaves to NumPy arrays, since the order of summed rows may differ."""
    table = np.zeros(tree["table"].shape)
    rows = np.asarray(tree["table"].indices)[:, 0]
    np.add.at(table, rows, np.asarray(tree["table"].data))
    return {"table": table, "bias": np.asarray(tree["bias"])}


@functools.cache
def on_one_device(clip):
    updates, metrics = helpers.quick_jit(meshes.update_of(clip.make()))(embedding())
    return dense(updates), metrics


@pytest.mark.covering(clip=SPARSE, mode=meshes.MODES, split=[True, False])
def test_sparse_leaf_on_mesh_is_clipped_as_on_one_device(clip, mode, split):
    """Run unsharded, or with the looked-up rows sharded over devices."""
    mesh = meshes.mesh_of("8", mode)
    spec = P("data") if split else P()
    given = embedding()
    if mode == "shard_map":
        specs = {"table": spec, "bias": P()}
        update = jax.shard_map(
            meshes.update_of(meshes.made(clip, BY_ROW)),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(specs, P()),
        )
    else:
        update = meshes.update_of(clip.make())
        given["table"] = jax.device_put(given["table"], NamedSharding(mesh, spec))
    updates, metrics = helpers.quick_jit(update)(given)
    place = NamedSharding(mesh, spec)
    assert updates["table"].data.sharding.is_equivalent_to(place, 2)
    assert np.max(np.abs(updates["table"].data)) < 16
    expected, expected_metrics = on_one_device(clip)
    chex.assert_trees_all_close(dense(updates), expected, rtol=1e-6)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-6)


@pytest.mark.parametrize("axis_name", [BY_ROW, None], ids=["specs", "types"])
def test_average_norm_split_sparse_leaf_raises(axis_name):
    """No device has the number of elements of the whole leaf."""
    step = jax.shard_map(
        lambda t: clip_by_average_norm(t, 0.1, axis_name=axis_name),
        mesh=meshes.mesh_of("8", "shard_map"),
        in_specs=(BY_ROW,),
        out_specs=(BY_ROW, P()),
    )
    with pytest.raises(ValueError, match="A BCOO leaf must be on one device.*is split"):
        jax.eval_shape(step, embedding())


# Moved states keep the memory and the devices of their arrays.

CLIP = optclip.clip_by_norm(thresholds.quantile(0.5, 4), record="leaves")
TX = optax.chain(CLIP, optax.adam(0.1))
TREE = {"bias": np.ones(8, np.float32), "kernel": np.ones((8, 4), np.float32)}
GROWN = {**TREE, "adapter": np.ones((8, 2), np.float32)}
BEFORE, AFTER = (
    carried.labeled(TX, dict(zip(TREE, labels, strict=True))) for labels in ("xx", "xy")
)
CHANGES = {
    "nothing": (TX, TX, TREE),
    "leaf": (TX, TX, GROWN),
    "skip": (TX, optclip.skip(TX, max_norm=thresholds.ema()), TREE),
    "history": (TX, optclip.with_history(TX, 2), GROWN),
    "labels": (BEFORE, AFTER, TREE),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("devices", [1, 8])
def test_carry_over_keeps_memory_and_shardings(change, memory, devices):
    tx, new_tx, new_tree = CHANGES[change]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def placed(tree, memory):
        return jax.tree.map(lambda x: jax.device_put(x, sharding_of(x, memory)), tree)

    def sharding_of(x, memory):
        spec = P("data") if x.shape[:1] == (8,) else P()
        return NamedSharding(mesh, spec, memory_kind=memory)

    tree, new_tree = (placed(x, "device") for x in (TREE, new_tree))
    state = placed(carried.numbered(tx.init(tree)), memory)
    moved, _ = carried.carried(tx, tree, state, new_tx, new_tree)
    for path, x in carried.arrays(moved).items():
        expected = sharding_of(x, memory)
        assert x.sharding.memory_kind == memory, path
        # A new array that is bound to no device is copied to all of them.
        assert not x.committed or x.sharding.is_equivalent_to(expected, x.ndim), path


# Losses that differ between devices: the largest counts on all of them.

ONES = np.ones(2, np.float32)
MESH = {"mesh": jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))}
BY_DEVICE = {"in_specs": P("data"), "out_specs": P("data"), **MESH}
MODES = {
    "shard_map": lambda run: jax.jit(jax.shard_map(run, **BY_DEVICE)),
    "untyped": lambda run: jax.jit(jax.shard_map(run, check_vma=False, **BY_DEVICE)),
    "pmap": lambda run: (
        lambda losses: jax.tree.map(
            lambda x: x[:, 0], jax.pmap(run, axis_name="data")(losses[:, None])
        )
    ),
}
OF_LOSS = {"number": 3.0, "rule": thresholds.scaled(thresholds.quantile(0.5, 4), 2.0)}


def runs_of(max_loss):
    """Return runs of steps, given the losses of each on one device."""
    tx = optclip.skip(optax.adam(0.1), max_loss=max_loss, axis_name=())
    tx = optclip.with_history(tx, 8)

    def step(state, loss):
        updates, state = tx.update(ONES, state, ONES, value=loss)
        return state, (updates, optclip.metrics(state))

    def run(losses):
        state, outs = jax.lax.scan(step, tx.init(ONES), losses)
        return state.history_rows, outs

    return jax.vmap(run, axis_name="run")


@pytest.mark.parametrize("limit", OF_LOSS)
@pytest.mark.parametrize("mode", MODES)
def test_skip_unequal_losses_act_as_largest_on_all_devices(mode, limit):
    """Those of vmapped runs stay apart, in metrics, histories and learned limits."""
    runs, spikes = runs_of(OF_LOSS[limit]), [np.nan, np.inf, -np.inf, 9.0, 2.0]
    worst = np.full((5, 6), 2.0, np.float32)
    worst[:, 3] = spikes
    expected = jax.jit(runs)(worst)
    metrics = expected[1][1]
    np.testing.assert_array_equal(metrics["skip/loss"], worst)
    np.testing.assert_array_equal(metrics["skip/skipped"][:, -1], [1, 1, 1, 1, 0])
    losses = np.stack([np.full_like(worst, x) for x in (1.0, 1.5, 2.0, -3.0)])
    losses[1, :, 3] = spikes
    found = MODES[mode](
        lambda x: jax.tree.map(lambda x: jnp.asarray(x)[None], runs(x[0]))
    )(losses)
    on_all = jax.tree.map(lambda x: np.stack([x] * 4), expected)
    chex.assert_trees_all_equal(jax.device_get(found), on_all)


def test_skip_loss_alike_on_all_devices_needs_no_collective():
    tx = optclip.with_history(optclip.skip(optax.sgd(1.0), max_loss=3.0), 2)
    step = jax.shard_map(
        lambda x, loss: tx.update(x, tx.init(x), value=loss)[0],
        in_specs=P(),
        out_specs=P(),
        **MESH,
    )
    assert "all_reduce" not in jax.jit(step).lower(1.0, 1.0).as_text()


def test_skip_unequal_losses_permit_derivatives():
    def updated(scale, loss):
        tx = optclip.skip(optax.sgd(1.0), max_loss=3.0)
        return tx.update(scale, tx.init(scale), value=scale * loss[0])[0]

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), **MESH}
    step = jax.jit(jax.shard_map(jax.grad(updated), **specs))
    assert step(1.0, np.array([1, 2, 3, 1.0], np.float32)) == -1
    assert step(1.0, np.array([1, 2, 4, 1.0], np.float32)) == 0
