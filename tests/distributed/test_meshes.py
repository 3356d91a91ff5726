"""Every transformation on meshes gives the result of one device, to within 1e-6."""

import contextlib
import functools

import chex
import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import optclip
from optclip import thresholds
from tests.support import covering, helpers, meshes

# The number of ways in which leaves are split. XLA uses one all-reduce for each of
# them, and shard_map one for each set of mesh axes, however many leaves there are.
WAYS = {
    ("8", "split"): 1, ("8", "mixed"): 1, ("2x4", "split"): 3, ("2x4", "mixed"): 2,
    ("2x2x2", "split"): 4, ("2x2x2", "mixed"): 3,
}  # fmt: skip
# At most so many all-reduces per way: one in the first pass and one in the branch for
# norms out of range. The flags of a policy, the peak of a leaf, the record of slices
# and each product over a split side of a matrix have their own.
TIMES = {
    "proportional": 3, "axes": 7, "matrices": 16, "value-two-bounds": 8,
}  # fmt: skip

# Matrices split on both sides are rejected.
HARD = {clip.id: clip for clip in meshes.CLIPS + meshes.LEARNED if not clip.of_matrices}
# One for each set of lines that call collectives; all with `--full`.
KINDS = [
    "value", "norm", "norm-axis", "global-norm-3", "proportional",
    "ema by unit", "quantile by unit", "moment", "largest element", "chained",
]  # fmt: skip

alone = functools.cache(meshes.on_one_device)


@pytest.mark.covering(
    clip=meshes.CLIPS,
    shape=list(meshes.MESHES),
    placement=meshes.PLACEMENTS,
    mode=meshes.MODES,
    # test_matrix_meshes.py tests the clips of matrices in each mode.
    where=lambda clip, **how: (
        clip.takes(**how) and (covering.full or not clip.of_matrices)
    ),
)
def test_clip_on_mesh_matches_one_device(clip, shape, placement, mode):
    expected = alone(clip, meshes.update_of)
    found = meshes.on_a_mesh(clip, shape, placement, mode, meshes.update_of)
    assert helpers.differs(expected.updates, meshes.gradients())
    room = clip.roundings * 2.0**-23
    chex.assert_trees_all_close(found[:2], expected[:2], rtol=1e-6, atol=room)
    if clip.of_matrices and mode != "shard_map":
        # XLA places the products, and gathers what is split on its smaller side.
        return
    ways = WAYS.get((shape, placement), 0)
    collectives = found.program.count(" all-reduce(")
    assert (collectives > 0) == (ways > 0)
    assert collectives <= ways * TIMES.get(clip.id, TIMES.get(clip.traits[0], 2))
    assert "all-gather" not in found.program


@pytest.mark.covering(
    clip=meshes.LEARNED,
    mode=meshes.MODES,
    placement=["split", "mixed"],
    # The test of hard gradients runs every kind of memory in shard_map.
    where=lambda clip, mode, placement: (
        covering.full or (mode != "shard_map" and clip.id not in KINDS)
    ),
)
def test_learned_threshold_on_mesh_matches_one_device(clip, mode, placement):
    """Run a scan from `init` on, so that the state must preserve its type."""
    expected = alone(clip, meshes.run_of)
    found = meshes.on_a_mesh(clip, "2x4", placement, mode, meshes.run_of)
    assert helpers.differs(expected.updates["out"][1], 10 * meshes.gradients()["out"])
    chex.assert_trees_all_close(found[:2], expected[:2], rtol=1e-6)


def hard_runs():
    """Three steps each: of gradients, of larger, and of finite ones.

    Each leaf has the largest norm once. Some norms are out of range, on all devices or
    on some, and one element is NaN.
    """
    usual = jax.tree.map(np.asarray, meshes.gradients())
    loud = usual | {"kernel": np.float32(1e3) * usual["kernel"]}
    trees = [
        jax.tree.map(lambda x, scale=scale: np.float32(scale) * x, tree)
        for tree in (usual, loud)
        for scale in (1.0, 1e25, 1e-25)
    ]
    kernel, out = usual["kernel"].copy(), usual["out"].copy()
    kernel[0, 0] = np.nan
    out[:, 0] *= np.float32(1e25)
    for tree in (*trees, usual | {"kernel": kernel}, usual | {"out": out}):
        larger = jax.tree.map(lambda x: 10 * x, tree)
        finite = jax.tree.map(lambda x: np.where(np.isnan(x), 1, x), tree)
        yield jax.tree.map(lambda *x: np.stack(x), tree, larger, finite)


@pytest.mark.parametrize("name", HARD if covering.full else KINDS)
def test_clip_of_hard_gradients_in_shard_map_matches_one_device(name):
    """Every collective is needed: without it an update or a record changes."""
    mesh = meshes.mesh_of("2x4", "shard_map")
    specs = meshes.specs_of("mixed", mesh.axis_names)
    rows = {key: P(None, *spec) for key, spec in specs.items()}

    def run_of(tx):
        def run(trees, params):
            def step(state, tree):
                updates, state = tx.update(tree, state, params)
                return state, (updates, optclip.metrics(state))

            return jax.lax.scan(step, tx.init(params), trees)[1]

        return run

    mapped = jax.shard_map(
        run_of(meshes.made(HARD[name], specs)),
        mesh=mesh,
        in_specs=(rows, specs),
        out_specs=(rows, P()),
    )
    runs = helpers.quick_jit(mapped), helpers.quick_jit(run_of(HARD[name].make()))
    params = jax.tree.map(np.ones_like, meshes.gradients())
    clipped = []
    for trees in hard_runs():
        found, expected = (run(trees, params) for run in runs)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
        clipped.append(helpers.differs(expected[0], trees))
    assert any(clipped)


ELEMENTS = optclip.clip_by_value(thresholds.moment(decay=0.5))
ROWS = optclip.clip_by(thresholds.quantile(0.5, 3), over=optclip.axes(-1))


@pytest.mark.parametrize(
    ("where", "tx"),
    [
        (where, tx)
        for i, where in enumerate(["eager", "eager on auto", "in a mesh", "traced"])
        for tx in covering.rotated([ELEMENTS, ROWS], i)
    ],
)
def test_rule_memory_is_sharded_like_its_norms(tx, where):
    """From `init` on, unless that is traced outside a mesh."""
    mesh = meshes.mesh_of("2x4", "auto" if where == "eager on auto" else "explicit")
    place = NamedSharding(mesh, P("data", None if tx is ROWS else "model"))
    split = jax.device_put(
        np.ones((8, 4), np.float32), NamedSharding(mesh, P("data", "model"))
    )
    tree = {"alone": np.ones(3, np.float32), "split": split}

    def is_sharded(state):
        memories = [x for x in jax.tree.leaves(state) if x.shape[:1] == (8,)]
        return all(x.sharding.is_equivalent_to(place, x.ndim) for x in memories)

    init = tx.init if where.startswith("eager") else helpers.quick_jit(tx.init)
    with jax.set_mesh(mesh) if where == "in a mesh" else contextlib.nullcontext():
        state = init(tree)
    assert is_sharded(state) == (where != "traced")
    update = helpers.quick_jit(tx.update)
    for _ in range(2):
        updates, state = update(tree, state)
        assert updates["split"].sharding.is_equivalent_to(split.sharding, 2)
        assert is_sharded(state)
