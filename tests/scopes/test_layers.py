"""Test norms per layer of models that stack their layers in each array."""

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import plot, thresholds
from tests.support import covering, helpers, oracles

OVER = optclip.layers("net/layers")
SIZES, LIMITS = [1.0, 0.01, 5.0, 2.0], [9.0, 9.0, 1.0, 2.0]
SHAPES = {"kernel": (8, 2), "scale": (8,), "bias": (1,)}
STACKS = {
    "stages": {"kernel": P("a", "b"), "scale": P("a", "b"), "bias": P("a")},
    "model": {"kernel": P(None, "b", "a"), "scale": P(None, "a"), "bias": P()},
}


def layers():
    rng = np.random.default_rng(0)
    return [
        {k: np.float32(size * rng.normal(size=s)) for k, s in SHAPES.items()}
        for size in SIZES
    ]


def stacked(of_layers, axis=0):
    """Return a model with the layers stacked, and two more leaves."""
    stack = {k: np.stack([x[k] for x in of_layers], axis) for k in SHAPES}
    return {"net": {"layers": stack, "norm": np.ones(4, "f")}, "embed": np.ones(4, "f")}


def update(tx, tree):
    return helpers.quick_jit(lambda t: tx.update(t, tx.init(t)))(tree)


@pytest.mark.parametrize(
    ("norm", "axis", "each_leaf"),
    [("l2", 0, False), ("l1", -1, True), (3.0, 1, False), ("rms", 0, False)],
)
def test_layers_of_any_axis_and_norm_match_numpy(norm, axis, each_leaf):
    power = {"l2": 2.0, "l1": 1.0, 3.0: 3.0, "rms": 2.0}[norm]

    def measure(tree):
        x = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        return oracles.norm(x, power) / (x.size**0.5 if norm == "rms" else 1.0)

    def clip(layer, limit):
        if each_leaf:
            return {k: x * oracles.hard(measure(x), limit) for k, x in layer.items()}
        factor = oracles.hard(measure(layer), limit)
        return jax.tree.map(lambda x: x * factor, layer)

    keys = [f"net/layers/{k}" for k in SHAPES] if each_leaf else ["net/layers"]
    limits = dict.fromkeys(keys, np.float32(LIMITS)) | {"net/norm": None, "embed": 0.5}
    over = optclip.layers("net/layers", axis=axis, each_leaf=each_leaf)
    tree = stacked(layers(), axis)
    found, _ = update(optclip.clip_by(limits, over=over, norm=norm), tree)
    exact = map(helpers.as_float64, layers())
    expected = stacked([clip(*p) for p in zip(exact, LIMITS, strict=True)], axis)
    expected["embed"] *= oracles.hard(measure(tree["embed"]), 0.5)
    helpers.assert_close(found, expected)
    assert helpers.differs(found["net"]["layers"], tree["net"]["layers"])


def test_rule_has_one_memory_per_layer_and_history_one_column():
    """The second step is scaled by `min(1, 2 / norm)` of the first, for each layer."""
    clip = optclip.clip_by(thresholds.previous_norm(2.0), over=OVER, record="leaves")
    tx, tree = optclip.with_history(clip, 5), stacked(layers())
    step = helpers.quick_jit(tx.update)
    _, state = step(tree, tx.init(tree))
    found, state = step(tree, state)
    norms = np.array([oracles.tree_norm(x) for x in layers()])
    for key, x in found["net"]["layers"].items():
        for i in range(4):
            wanted = layers()[i][key] * oracles.hard(norms[i], 2.0)
            np.testing.assert_allclose(x[i], wanted, rtol=1e-6)
    run, last = optclip.history(state), optclip.metrics(state)
    for i in range(4):
        part = f"net/layers/{i}"
        np.testing.assert_allclose(run[f"clip/norm/{part}"], [norms[i]] * 2, rtol=1e-6)
        is_clipped = norms[i] > 2
        wanted = [norms[i], 2 * is_clipped, is_clipped, is_clipped]
        fields = ("norm", "clipped", "rate", "fraction")
        recorded = [float(last[f"clip/{field}/{part}"]) for field in fields]
        np.testing.assert_allclose(recorded, wanted, rtol=1e-6)
    rows = [label.get_text() for label in plot.heatmap(run).get_yticklabels()]
    # The stack is where its largest layer is, its layers in their order.
    assert rows == [*(f"net/layers/{i}" for i in range(4)), "embed", "net/norm"]


@pytest.mark.parametrize(
    ("mode", "split"),
    [
        (mode, split)
        for i, mode in enumerate(["auto", "explicit", "shard_map"])
        for split in covering.rotated([*STACKS], i)
    ],
)
def test_layers_on_a_mesh_equal_numpy(mode, split):
    """Devices hold some of the layers, or a part of each; the record has all."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    specs = {"net": {"layers": STACKS[split], "norm": P()}, "embed": P("b")}
    named = specs if mode == "shard_map" else None
    tx = optclip.clip_by(2.0, over=OVER, record="leaves", axis_name=named)
    tree = stacked(layers())

    def step(tree):
        found, state = tx.update(tree, tx.init(tree))
        return found, optclip.metrics(state)

    if mode == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    else:
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        tree = jax.device_put(tree, places)
    found, recorded = helpers.quick_jit(step)(tree)
    helpers.assert_close(found, stacked([oracles.by_tree(x, 2.0) for x in layers()]))
    for i, layer in enumerate(layers()):
        norm = oracles.tree_norm(layer)
        parts = {k: recorded[f"clip/{k}/net/layers/{i}"] for k in ("norm", "clipped")}
        np.testing.assert_allclose(list(parts.values()), [norm, norm > 2], rtol=1e-6)


def test_program_does_not_grow_with_layers():
    tx = optclip.with_history(optclip.clip_by(1.0, over=OVER, record="leaves"), 5)
    sizes = set()
    for count in (4, 40):
        tree = stacked(layers() * (count // 4))
        lowered = jax.jit(tx.update).lower(tree, tx.init(tree))
        sizes.add(len(lowered.as_text().splitlines()))
    assert len(sizes) == 1


def test_masked_leaf_of_a_layer_is_neither_measured_nor_scaled():
    mask = optclip.by_path(lambda path: not path.endswith("kernel"))
    tree = stacked(layers())
    found, _ = update(optclip.clip_by(1.0, over=OVER, mask=mask), tree)
    rest = [{k: x for k, x in layer.items() if k != "kernel"} for layer in layers()]
    wanted = [oracles.by_tree(x, 1.0)["scale"] for x in rest]
    np.testing.assert_allclose(found["net"]["layers"]["scale"], wanted, rtol=1e-6)
    kernel = tree["net"]["layers"]["kernel"]
    np.testing.assert_array_equal(found["net"]["layers"]["kernel"], kernel)


@pytest.mark.parametrize(
    ("over", "more", "match"),
    [
        (optclip.layers("body"), {}, r"got 'body'; their paths begin with \['embed'"),
        (optclip.layers("net"), {}, "along axis 0, got 4 in the leaf 'net/layers/bias'"),
        (optclip.layers("embed", axis=1), {}, r"got \(1,\) for the leaf 'embed'"),
        (optclip.layers("sparse"), {}, "'sparse' is a BCOO matrix, which cannot be st"),
        (OVER, {"norm": "spectral"}, "got a block of 3 stacked layers"),
        (OVER, {"threshold": {"net": {"layers": 1.0}}}, "as one key, not as 2 nested"),
    ],
    ids=["path", "lengths", "axis", "sparse", "spectral", "keys"],
)  # fmt: skip
def test_wrong_layers_raise_value_error(over, more, match):
    tx = optclip.clip_by(**{"threshold": 1.0, "over": over, **more})
    tree = stacked(layers())
    tree["net"]["norm"] = tree["net"]["norm"][:3]
    tree["sparse"] = helpers.as_bcoo(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match=match):
        tx.init(tree)
