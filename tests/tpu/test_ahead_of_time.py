"""Clip and AdamW on sharded trees, compiled for TPUs that need not be there."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from optclip import _roots

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")


def mesh_of(topology, kind):
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(found.devices), ("data",), axis_types=(kind,))


def sharded(mesh, shape, dtype):
    """Split over its first axis, as FSDP does, where that divides."""
    splits = shape and shape[0] % mesh.size == 0
    spec = P("data", *[None] * (len(shape) - 1)) if splits else P()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def transformer(mesh, dtype, num_layers=1, d=768):
    layer = [(d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d)]
    shapes = [(50_176, d), (100,), *layer * num_layers]
    return [sharded(mesh, shape, dtype) for shape in shapes]


def program(mesh, clip, dtype):
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        tree = transformer(mesh, dtype)
        state = jax.tree.map(
            lambda x: sharded(mesh, x.shape, x.dtype), jax.eval_shape(tx.init, tree)
        )
        return jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree).compile()


def accessed(program):
    return program.cost_analysis()["bytes accessed"]


def collectives(text):
    names = "|".join(COLLECTIVES)
    return re.findall(rf"= (\S.*?) ({names})(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("topology", "kind", "dtype"),
    [
        ("v5e:2x2", AxisType.Auto, "bfloat16"),
        ("v5e:2x2", AxisType.Explicit, "float32"),
        ("v5p:2x2x4", AxisType.Auto, "float32"),
        ("v5e:16x16", AxisType.Auto, "float32"),
        ("v5e:16x16", AxisType.Auto, "bfloat16"),
        ("v5e:16x16", AxisType.Explicit, "bfloat16"),
    ],
)
def test_one_all_reduce_of_scalars(topology, kind, dtype):
    """On the way that is taken, and one in the branch for norms out of range."""
    mesh = mesh_of(topology, kind)
    plain = program(mesh, optax.identity(), dtype).as_text()
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    found = collectives(ours.as_text())
    assert not collectives(plain)
    assert [name for _, name in found] == ["all-reduce"] * 2
    assert len(re.findall(r" conditional\(", ours.as_text())) == 1
    for shapes, _ in found:
        sizes = re.findall(r"([a-z]+\d+)\[(\d*)\]", shapes)
        assert sizes
        assert all(name == "f32" and size in ("", "1") for name, size in sizes)
    room, their_room = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    print(f"\n{topology} {kind} {dtype}: temporaries {room}, optax {their_room}")
    # What the fusions of the branch pad; it does not grow with the tree.
    assert room < 2e6


@pytest.mark.parametrize(
    ("topology", "dtype", "room"),
    [
        ("v5e:2x2", "float32", 1.005),
        ("v5e:2x2", "bfloat16", 1.005),
        ("v5e:16x16", "float32", 1.005),
        # Of 256 parts, 356 kB each: what small leaves take to be joined shows.
        ("v5e:16x16", "bfloat16", 1.15),
    ],
)
def test_no_more_bytes_than_optax(topology, dtype, room, monkeypatch):
    """Short of the branch, whose bytes XLA counts as if it were taken."""
    monkeypatch.setattr(_roots, "_may_leave_range", lambda *_: False)
    monkeypatch.setattr(_roots, "_compiled", _roots._compiled.__wrapped__)
    mesh = mesh_of(topology, AxisType.Auto)
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    assert " conditional(" not in ours.as_text()
    assert 0 < accessed(ours) <= room * accessed(theirs)
