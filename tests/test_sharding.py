"""Inside shard_map the norm spans the axes in each leaf's type; replicas count once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip.functional import clip_by_global_norm, clip_by_value

SPECS = {"split": P("data"), "both": P("data", "model"), "whole": P()}
LABELS = {"split": "a", "both": "a", "whole": "b"}


def sharded(function):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    return jax.jit(
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
        optclip.clip_by_global_norm(1.0),
        optclip.clip_by_global_norm(1.0, ord=1.0),
        optclip.clip_by_global_norm(1.0, ord=3.0),
        optclip.clip_by_global_norm(1.0, ord=float("inf")),
        optclip.clip_by_global_norm(1.0, nonfinite="drop"),
        optclip.clip_by_norm(1.0),
        optclip.clip_by_rms(0.5),
        optclip.clip_by_average_norm(0.5),
        optclip.clip_by_group_norm(1.0, LABELS),
        optclip.clip_by_value(0.5),
        optclip.clip_by_value(0.5, response="tanh"),
        optclip.clip_by_value(0.5, response="proportional"),
        optclip.clip_by_value(optclip.thresholds.moment(decay=0.5)),
        optclip.clip_by_norm(optclip.thresholds.ema(max_norm=2.0)),
        optclip.clip_by(optclip.thresholds.ema(max_norm=2.0), over=optclip.ELEMENT),
        optclip.recipes.autoclip(0.0, window=4, response="smooth"),
    ],
)
def test_the_same_as_on_one_device(tx):
    def clip(t):
        updates, state = tx.update(t, tx.init(t))
        return updates, optclip.metrics(state)

    expected, expected_metrics = clip(tree())
    found, found_metrics = sharded(clip)(tree())
    for key, leaf in expected.items():
        assert not np.array_equal(leaf, tree()[key])
        np.testing.assert_allclose(found[key], leaf, rtol=5e-7)
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(found_metrics[key], value, rtol=5e-7)


def test_local_on_purpose():
    """With axis_name=() every device clips by its own part."""

    def clip(t):
        own, _ = optclip.functional.clip_by_global_norm(t, 1.0, axis_name=())
        return own, 0.0

    alone = {"split": tree()["split"], "both": None, "whole": None}
    found, _ = sharded(clip)(alone)
    np.testing.assert_allclose(np.linalg.norm(found["split"]), 2.0, rtol=1e-6)


def test_axes_of_a_split_leaf_must_be_told():
    def clip(t):
        return optclip.functional.clip_by_norm(t, 1.0, axis=0), 0.0

    with pytest.raises(ValueError, match="does not say which dimension is split"):
        sharded(clip)(tree())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("size", [64, 8192])
def test_collectives_do_not_grow_with_the_leaves(kind, size):
    """Nor does a leaf that is split get gathered, however small."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split = NamedSharding(mesh, P("data"))
    counts = []
    for number in (2, 12):
        tree = [jax.device_put(jnp.ones(size), split) for _ in range(number)]
        clip = jax.jit(lambda tree: clip_by_global_norm(tree, 1.0))
        text = clip.lower(tree).compile().as_text()
        assert "all-gather" not in text
        counts.append(text.count(" all-reduce("))
        np.testing.assert_allclose(clip(tree)[1], (number * size) ** 0.5, rtol=1e-6)
    assert counts[0] == counts[1] <= 2


def test_hundreds_of_leaves_on_a_mesh():
    """Too many for one all-reduce on TPU: added in pairs first, and still to 2 ULP."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(8, 2 + i % 3)).astype(np.float32) for i in range(300)]
    tree = jax.device_put(leaves, NamedSharding(mesh, P("data")))
    found = np.float64(jax.jit(lambda tree: clip_by_global_norm(tree, 1.0)[1])(tree))
    exact = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in leaves))
    assert abs(found - exact) <= 2 * np.spacing(np.float32(exact))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_values_on_a_mesh(kind, run):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("data")))
    found = run(lambda x: clip_by_value(x, -1.0, 3.0))(x)
    np.testing.assert_array_equal(found, np.minimum(np.arange(16.0), 3).reshape(8, 2))
    assert found.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_replicated_leaves_stay_so(dtype):
    """What keeps XLA from merging two readings does not make a whole leaf vary."""
    narrow = {key: leaf.astype(dtype) for key, leaf in tree().items()}

    def clip(t):
        out, norm = optclip.functional.clip_by_global_norm(t, 1.0)
        assert jax.typeof(out["whole"]).manual_axis_type.varying == frozenset()
        return out, norm

    found, norm = sharded(clip)(narrow)
    exact = np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in tree().values()))
    np.testing.assert_allclose(norm, exact, rtol=2e-7)
    for key, leaf in tree().items():
        expected = np.float64(leaf) / exact
        np.testing.assert_allclose(np.float64(found[key]), expected, rtol=5e-3)


def embedding():
    """A sparse gradient of 24 rows of which 8 were looked up, and a dense leaf."""
    rows = jnp.arange(16.0).reshape(8, 2) + 1
    indices = jnp.array([[3], [0], [7], [11], [5], [20], [2], [9]])
    return {"table": BCOO((rows, indices), shape=(24, 2)), "bias": jnp.full(2, 9.0)}


def dense(leaf):
    if not isinstance(leaf, BCOO):
        return leaf
    out = np.zeros(leaf.shape)
    np.add.at(out, np.asarray(leaf.indices)[:, 0], np.asarray(leaf.data))
    return out


SPARSE = {
    "tree": optclip.clip_by_global_norm(2.0),
    "leaf": optclip.clip_by_norm(2.0),
    "group": optclip.clip_by_group_norm(2.0, {"table": "a", "bias": "b"}),
    "value": optclip.clip_by_value(2.0),
    "rows": optclip.clip_by_norm(2.0, axis=-1),
    "drop": optclip.clip_by_norm(2.0, nonfinite="drop"),
    "strict": optclip.clip_by_norm(2.0, strict=True),
}
TOLD = {
    "rows": optclip.clip_by_norm(
        2.0, axis=-1, axis_name={"table": P("data"), "bias": P()}
    )
}


@pytest.mark.parametrize("mode", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_leaves_on_a_mesh(name, split, mode):
    """Whole, or with the rows that were looked up split over devices."""

    def clip(t, tx=SPARSE[name]):
        updates, state = tx.update(t, tx.init(t))
        return updates, optclip.metrics(state)

    expected, expected_metrics = jax.jit(clip)(embedding())
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    spec = P("data") if split else P()
    specs = {"table": spec, "bias": P()}
    if mode == "shard_map":
        step = jax.shard_map(
            lambda t: clip(t, TOLD.get(name, SPARSE[name])),
            mesh=mesh, in_specs=(specs,), out_specs=(specs, P()),
        )  # fmt: skip
        found, metrics = jax.jit(step)(embedding())
    else:
        place = NamedSharding(mesh, spec)
        given = embedding()
        given["table"] = jax.tree.map(
            lambda x: jax.device_put(x, place), given["table"]
        )
        found, metrics = jax.jit(clip)(given)
        assert found["table"].data.sharding.is_equivalent_to(place, 2)
    assert np.max(np.abs(found["table"].data)) < 16
    # Rows that were summed may come in another order.
    for key in ("table", "bias"):
        a, b = (dense(t[key]) for t in (found, expected))
        np.testing.assert_allclose(a, b, rtol=3e-7)
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=3e-7)


@pytest.mark.parametrize("told", [True, False])
def test_the_count_of_a_split_sparse_leaf_is_not_known(told):
    specs = {"table": P("data"), "bias": P()}

    def clip(t):
        own = specs if told else None
        return optclip.functional.clip_by_average_norm(t, 0.1, axis_name=own)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    with pytest.raises(
        ValueError, match="How many elements a BCOO leaf has that is split"
    ):
        jax.jit(step)(embedding())
