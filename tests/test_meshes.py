"""Every transformation on meshes is as on one device, to a few units in the last place.

A quarter of all cells of the matrix; all of them are in `python -m tests.meshes`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from tests import helpers, meshes

CASES = meshes.a_quarter()
# In how many ways leaves are split: each takes XLA an all-reduce of its own, and in
# shard_map each set of mesh axes one. However many leaves there are.
WAYS = {
    ("8", "split"): 1, ("8", "mixed"): 1, ("2x4", "split"): 3, ("2x4", "mixed"): 2,
    ("2x2x2", "split"): 4, ("2x2x2", "mixed"): 3,
}  # fmt: skip
# Once in the pass that is taken and once in the branch for norms out of range. A maximum
# needs no branch; over slices the record adds its own.
TIMES = {
    "global-norm-inf": 1,
    "proportional": 3,
    "drop": 3,
}
# At most: what is masked is split in fewer ways; slices of one leaf lie on one device.
AT_MOST = {"masked": 2, "skip": 4, "norm-axis": 5, "rms-axis": 5, "units": 5}


@pytest.fixture(scope="module")
def alone():
    """The update and record of each entry on one device, computed once."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = meshes.on_one_device(name)
        return found[name]

    return of


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_as_on_one_device(case, alone):
    expected, found = alone(case.entry), meshes.on_a_mesh(case)
    assert helpers.differs(expected.updates, meshes.gradients())
    apart = meshes.ulps_between(found.updates, expected.updates)
    assert apart <= meshes.room(case)
    assert meshes.ulps_between(found.metrics, expected.metrics) <= meshes.room(case)
    assert meshes.is_placed_as_told(case, found.updates)
    ways = WAYS.get((case.shape, case.placement), 0)
    ways = min(ways, 2) if case.mode == "shard_map" else ways
    if case.entry in AT_MOST:
        assert found.collectives <= ways * AT_MOST[case.entry]
    else:
        assert found.collectives == ways * TIMES.get(case.entry, 2)


def test_the_quarter_has_all_kinds():
    for i in range(4):
        assert {case[i] for case in CASES} == {case[i] for case in meshes.every_case()}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", meshes.LEARNED)
def test_what_is_learned_is_the_same(name, kind):
    """Over three steps, the second ten times as large; memory and record included."""
    tx = meshes.make(name)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    specs = {"bias": P(), "kernel": P("data", "model"), "out": P(None, "data")}
    places = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}

    @jax.jit
    def update(tree, state):
        return tx.update(tree, state, jax.tree.map(jnp.ones_like, tree))

    tree = meshes.gradients()
    state, placed_state = tx.init(tree), tx.init(jax.device_put(tree, places))
    clipped = False
    for scale in (1.0, 10.0, 1.0):
        scaled = jax.tree.map(lambda x, scale=scale: scale * x, tree)
        expected, state = update(scaled, state)
        found, placed_state = update(jax.device_put(scaled, places), placed_state)
        clipped |= helpers.differs(expected, scaled)
        for key, x in expected.items():
            np.testing.assert_allclose(found[key], x, rtol=1e-6)
            assert found[key].sharding.is_equivalent_to(places[key], x.ndim)
    assert clipped
    for a, b in zip(jax.tree.leaves(placed_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    # A state that has been updated lies where it will lie from then on.
    _, later = update(jax.device_put(tree, places), placed_state)
    pairs = zip(jax.tree.leaves(later), jax.tree.leaves(placed_state), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


@pytest.mark.parametrize("name", meshes.LEARNED)
def test_what_is_learned_in_a_scan(name):
    """The whole run inside `shard_map`, from `init` on: its state keeps its type."""
    case = meshes.Case(name, "2x4", "mixed", "shard_map")
    mesh = meshes.mesh_of(case)
    specs = meshes.specs_of(case, mesh.axis_names)

    def train(tree, tx):
        def step(state, scale):
            scaled = jax.tree.map(lambda x: scale * x, tree)
            updates, state = tx.update(scaled, state, tree)
            return state, (updates, optclip.metrics(state))

        return jax.lax.scan(step, tx.init(tree), jnp.array([1.0, 10.0, 1.0]))[1]

    tree = meshes.gradients()
    expected = jax.jit(lambda tree: train(tree, meshes.make(name)))(tree)
    out = jax.tree.map(
        lambda spec: P(None, *spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    run = jax.shard_map(
        lambda tree: train(tree, meshes.make(name, specs)),
        mesh=mesh, in_specs=(specs,), out_specs=(out, P()),
    )  # fmt: skip
    found = jax.jit(run)(tree)
    assert helpers.differs(expected[0]["out"][1], 10 * tree["out"])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("where", ["eager", "in a mesh", "traced"])
def test_a_memory_lies_where_its_norms_do(where):
    """From `init` on, if that can know: traced, and outside of a mesh, it cannot."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    place = NamedSharding(mesh, P("data", "model"))
    tree = {
        "alone": np.ones(3, np.float32),
        "split": jax.device_put(jnp.ones((8, 4)), place),
    }
    tx = optclip.clip_by_value(thresholds.moment(decay=0.5))
    if where == "in a mesh":
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init)(tree)
    else:
        state = (tx.init if where == "eager" else jax.jit(tx.init))(tree)
    memory = [x for x in jax.tree.leaves(state) if x.shape == (8, 4)]
    assert [x.sharding.is_equivalent_to(place, 2) for x in memory] == [
        where != "traced"
    ]
    out, new = jax.jit(tx.update)(tree, state)
    assert out["split"].sharding.is_equivalent_to(place, 2)
    later = [x for x in jax.tree.leaves(new) if x.shape == (8, 4)]
    assert all(x.sharding.is_equivalent_to(place, 2) for x in later)
    np.testing.assert_allclose(later[0], 0.5)
