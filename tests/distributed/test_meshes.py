"""Every transformation on meshes is as on one device, to 1e-6."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from tests.support import helpers, meshes

# In how many ways leaves are split: each takes XLA an all-reduce of its own, and in
# shard_map each set of mesh axes one. However many leaves there are.
WAYS = {
    ("8", "split"): 1, ("8", "mixed"): 1, ("2x4", "split"): 3, ("2x4", "mixed"): 2,
    ("2x2x2", "split"): 4, ("2x2x2", "mixed"): 3,
}  # fmt: skip
# At most: one in the pass that is taken and one in the branch for norms out of range;
# the flags of a policy, the peak of a leaf and the record of slices have their own. So
# has each product over a side that is split: those of one matrix are not added together.
TIMES = {"proportional": 3, "drop": 3, "skip": 4, "axes": 5, "matrices": 16}

alone = functools.cache(meshes.on_one_device)


@pytest.mark.covering(
    clip=meshes.CLIPS,
    shape=list(meshes.MESHES),
    placement=meshes.PLACEMENTS,
    mode=meshes.MODES,
    where=lambda clip, **how: clip.takes(**how),
)
def test_as_on_one_device(clip, shape, placement, mode):
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
    assert collectives <= ways * TIMES.get(clip.traits[0], 2)
    assert "all-gather" not in found.program


@pytest.mark.covering(
    clip=meshes.LEARNED, mode=meshes.MODES, placement=["split", "mixed"]
)
def test_what_is_learned_is_the_same(clip, mode, placement):
    """The whole run, from `init` on: its state keeps its type, as a scan asks for."""
    expected = alone(clip, meshes.run_of)
    found = meshes.on_a_mesh(clip, "2x4", placement, mode, meshes.run_of)
    assert helpers.differs(expected.updates["out"][1], 10 * meshes.gradients()["out"])
    chex.assert_trees_all_close(found[:2], expected[:2], rtol=1e-6)


@pytest.mark.parametrize("where", ["eager", "eager on auto", "in a mesh", "traced"])
def test_a_memory_lies_where_its_norms_do(where):
    """From `init` on, if that can know: traced, and outside of a mesh, it cannot."""
    kind = AxisType.Auto if where == "eager on auto" else AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    place = NamedSharding(mesh, P("data", "model"))
    tree = {
        "alone": np.ones(3, np.float32),
        "split": jax.device_put(jnp.ones((8, 4)), place),
    }
    tx = optclip.clip_by_value(thresholds.moment(decay=0.5))

    def of_the_split(state):
        memory = [x for x in jax.tree.leaves(state) if x.shape == (8, 4)]
        assert len(memory) == 1
        return memory[0]

    if where == "in a mesh":
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init)(tree)
    else:
        state = (jax.jit(tx.init) if where == "traced" else tx.init)(tree)
    known = of_the_split(state).sharding.is_equivalent_to(place, 2)
    assert known == (where in ("eager", "in a mesh"))
    update = helpers.quick_jit(tx.update)
    for step in (1, 2):
        out, state = update(tree, state)
        assert out["split"].sharding.is_equivalent_to(place, 2)
        # A state that has been updated lies where it will lie from then on.
        assert of_the_split(state).sharding.is_equivalent_to(place, 2)
        np.testing.assert_allclose(of_the_split(state), 1 - 0.5**step)
        np.testing.assert_allclose(out["split"], 1 - 0.5**step)
