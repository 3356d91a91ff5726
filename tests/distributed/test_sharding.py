"""Inside shard_map the norm spans the axes in each leaf's type; replicas count once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip._arrays import _axis_names
from optclip.functional import clip_by_global_norm, clip_by_value
from tests.support import helpers, meshes

SPECS = {"split": P("data"), "both": P("data", "model"), "whole": P()}
LABELS = {"split": "a", "both": "a", "whole": "b"}


def sharded(function):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    return helpers.quick_jit(
        jax.shard_map(function, mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P()))
    )


def tree():
    return {
        "split": jnp.arange(8.0) + 1,
        "both": jnp.full((4, 2), 2.0),
        "whole": jnp.array([3.0, 4.0]),
    }


@pytest.mark.parametrize(
    "tx",
    [
        optclip.clip_by_global_norm(1.0, ord=1.0),
        optclip.clip_by_value(0.5, response="tanh"),
        optclip.clip_by(optclip.thresholds.ema(max_norm=2.0), over="element"),
        optclip.recipes.autoclip(0.0, window=4, response="smooth"),
    ],
    ids=["of L1", "tanh", "learned of elements", "smooth and learned"],
)
def test_the_same_as_on_one_device(tx):
    """What none of those in `test_meshes.py` is."""

    def clip(t):
        updates, state = tx.update(t, tx.init(t))
        return updates, optclip.metrics(state)

    expected = helpers.quick_jit(clip)(tree())
    chex.assert_trees_all_close(sharded(clip)(tree()), expected, rtol=1e-6)
    for key, leaf in expected[0].items():
        assert not np.array_equal(leaf, tree()[key])


def test_each_device_may_clip_its_own_part():
    """With axis_name=() every device clips by its own part."""

    def clip(t):
        own, _ = optclip.functional.clip_by_global_norm(t, 1.0, axis_name=())
        return own, 0.0

    alone = {"split": tree()["split"], "both": None, "whole": None}
    found, _ = sharded(clip)(alone)
    np.testing.assert_allclose(np.linalg.norm(found["split"]), 2.0, rtol=1e-6)


def test_axes_of_a_split_leaf_must_be_declared():
    def clip(t):
        return optclip.functional.clip_by_norm(t, 1.0, axis=0), 0.0

    with pytest.raises(ValueError, match="does not say which dimension is split"):
        sharded(clip)(tree())


@pytest.mark.parametrize(
    ("kind", "size"), [(AxisType.Auto, 64), (AxisType.Explicit, 8192)], ids=str
)
def test_collectives_do_not_grow_with_the_leaves(kind, size):
    """Nor does a leaf that is split get gathered, however small."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split = NamedSharding(mesh, P("data"))
    counts = []
    for number in (2, 12):
        tree = [jax.device_put(jnp.ones(size), split) for _ in range(number)]
        clip = (
            jax.jit(lambda tree: clip_by_global_norm(tree, 1.0)).lower(tree).compile()
        )
        assert "all-gather" not in clip.as_text()
        counts.append(clip.as_text().count(" all-reduce("))
        np.testing.assert_allclose(clip(tree)[1], (number * size) ** 0.5, rtol=1e-6)
    assert counts[0] == counts[1] <= 2


def test_hundreds_of_leaves_on_a_mesh():
    """Too many for one all-reduce on TPU: added in pairs first, and no less right."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(8, 2 + i % 3)).astype(np.float32) for i in range(300)]
    tree = jax.device_put(leaves, NamedSharding(mesh, P("data")))
    found = helpers.quick_jit(lambda tree: clip_by_global_norm(tree, 1.0)[1])(tree)
    exact = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in leaves))
    np.testing.assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_values_on_a_mesh(kind, run):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("data")))
    found = run(lambda x: clip_by_value(x, lower=-1.0, upper=3.0))(x)
    np.testing.assert_array_equal(found, np.minimum(np.arange(16.0), 3).reshape(8, 2))
    assert found.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_replicated_leaves_stay_so(dtype):
    """What keeps XLA from merging two readings does not make a whole leaf vary."""
    narrow = {key: leaf.astype(dtype) for key, leaf in tree().items()}

    def clip(t):
        out, norm = optclip.functional.clip_by_global_norm(t, 1.0)
        assert _axis_names.varying(jax.typeof(out["whole"])) == frozenset()
        return out, norm

    found, norm = sharded(clip)(narrow)
    exact = np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in tree().values()))
    np.testing.assert_allclose(norm, exact, rtol=1e-6)
    for key, leaf in tree().items():
        expected = np.float64(leaf) / exact
        np.testing.assert_allclose(np.float64(found[key]), expected, rtol=5e-3)


def embedding():
    """A sparse gradient of 24 rows of which 8 were looked up, and a dense leaf."""
    rows = jnp.arange(16.0).reshape(8, 2) + 1
    indices = jnp.array([[3], [0], [7], [11], [5], [20], [2], [9]])
    return {"table": BCOO((rows, indices), shape=(24, 2)), "bias": jnp.full(2, 9.0)}


def _of(make, **options):
    """A clip at 2 that takes further options."""
    return lambda **more: make(2.0, **options, **more)


def dense(leaf):
    if not isinstance(leaf, BCOO):
        return leaf
    out = np.zeros(leaf.shape)
    np.add.at(out, np.asarray(leaf.indices)[:, 0], np.asarray(leaf.data))
    return out


BY_ROW = {"table": P("data"), "bias": P()}
SPARSE = [
    meshes.Clip("tree", _of(optclip.clip_by_global_norm), ("whole leaves",)),
    meshes.Clip("leaf", _of(optclip.clip_by_norm), ("whole leaves",)),
    meshes.Clip(
        "group",
        _of(optclip.clip_by_group_norm, groups={"table": "a", "bias": "b"}),
        ("whole leaves",),
    ),
    meshes.Clip("value", _of(optclip.clip_by_value), ("elements",)),
    meshes.Clip("rows", _of(optclip.clip_by_norm, axis=-1), ("rows",), True),
    meshes.Clip("drop", _of(optclip.clip_by_norm, nonfinite="drop"), ("drop",)),
    meshes.Clip("strict", _of(optclip.clip_by_norm, strict=True), ("strict",)),
]


@pytest.mark.covering(clip=SPARSE, mode=meshes.MODES, split=[True, False])
def test_sparse_leaves_on_a_mesh(clip, mode, split):
    """Whole, or with the rows that were looked up split over devices."""

    def update(tx):
        def one(t):
            updates, state = tx.update(t, tx.init(t))
            return updates, optclip.metrics(state)

        return one

    expected, expected_metrics = helpers.quick_jit(update(clip.make()))(embedding())
    mesh = meshes.mesh_of("8", mode)
    spec = P("data") if split else P()
    specs = {"table": spec, "bias": P()}
    if mode == "shard_map":
        step = jax.shard_map(
            update(meshes.made(clip, BY_ROW)),
            mesh=mesh, in_specs=(specs,), out_specs=(specs, P()),
        )  # fmt: skip
        found, metrics = helpers.quick_jit(step)(embedding())
    else:
        place = NamedSharding(mesh, spec)
        given = embedding()
        given["table"] = jax.tree.map(
            lambda x: jax.device_put(x, place), given["table"]
        )
        found, metrics = helpers.quick_jit(update(clip.make()))(given)
        assert found["table"].data.sharding.is_equivalent_to(place, 2)
    assert np.max(np.abs(found["table"].data)) < 16
    # Rows that were summed may come in another order.
    found, expected = ({k: dense(x) for k, x in t.items()} for t in (found, expected))
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-6)


@pytest.mark.parametrize("told", [True, False])
def test_the_count_of_a_split_sparse_leaf_is_not_known(told):
    specs = {"table": P("data"), "bias": P()}

    def clip(t):
        own = specs if told else None
        return optclip.functional.clip_by_average_norm(t, 0.1, axis_name=own)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    with pytest.raises(ValueError, match="A BCOO leaf must be on one device.*is split"):
        jax.jit(step)(embedding())


def test_the_record_of_norms_of_each_device_is_of_the_largest():
    """Inside shard_map each clips its own part; the state is the same on all."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = optclip.clip_by_global_norm(2.0, axis_name=())

    def step(x):
        clipped, state = tx.update(x, tx.init(x))
        return clipped, optclip.metrics(state)

    parts = jax.P("x")
    mapped = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=parts, out_specs=(parts, jax.P()))
    )
    clipped, found = mapped(jnp.arange(1.0, 9.0))
    np.testing.assert_allclose(clipped, np.minimum(np.arange(1.0, 9.0), 2.0))
    assert found["clip/norm"] == 8.0
    assert found["clip/coefficient"] == 0.25
    assert found["clip/rate"] == 1.0
