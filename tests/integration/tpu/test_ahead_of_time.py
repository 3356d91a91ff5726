"""Clip and AdamW on sharded trees, compiled for TPUs that need not be there."""

import re

import jax
import optax
import pytest
from jax.sharding import AxisType

import optclip
from benchmarks import tpu


def transformer(dtype, num_layers=1, d=768):
    layer = [(d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d)]
    shapes = [(50_176, d), (100,), *layer * num_layers]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def program(mesh, clip, dtype):
    return tpu.lowered(mesh, transformer(dtype), clip).compile()


def accessed(program):
    """The bytes that a step reads and writes on one chip, by XLA's own account."""
    return program.cost_analysis()["bytes accessed"]


def numbers_sent(program):
    """How many float32 scalars each all-reduce has; there is no other collective."""
    found = tpu.collectives(program.as_text())
    assert {kind for _, kind in found} <= {"all-reduce"}
    counts = []
    for shapes, _ in found:
        sizes = re.findall(r"([a-z]+\d+)\[(\d*)\]", shapes)
        assert all(name == "f32" and size in ("", "1") for name, size in sizes)
        counts.append(len(sizes))
    return counts


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
    """For both sums, the plain one and that which cannot overflow; and no branch."""
    mesh = tpu.mesh_of(topology, kind)
    plain = program(mesh, optax.identity(), dtype)
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    assert numbers_sent(plain) == []
    assert len(numbers_sent(ours)) == 1
    assert " conditional(" not in ours.as_text()
    room, their_room = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    assert room <= their_room + max(their_room, 1.1e6)


@pytest.mark.parametrize(
    ("topology", "kind", "dtype", "room"),
    [
        ("v5e:2x2", AxisType.Auto, "float32", 1.005),
        ("v5e:2x2", AxisType.Auto, "bfloat16", 1.005),
        ("v5e:2x2", AxisType.Explicit, "float32", 1.005),
        ("v5p:2x2x4", AxisType.Auto, "float32", 1.005),
        ("v5p:2x2x4", AxisType.Explicit, "bfloat16", 1.015),
        ("v5e:16x16", AxisType.Auto, "float32", 1.005),
        # Of 256 parts, 356 kB each: what small leaves take to be joined shows.
        ("v5e:16x16", AxisType.Auto, "bfloat16", 1.15),
        ("v5e:16x16", AxisType.Explicit, "bfloat16", 1.15),
    ],
)
def test_no_more_bytes_than_optax(topology, kind, dtype, room):
    """One reading is enough for both sums."""
    mesh = tpu.mesh_of(topology, kind)
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    found, allowed = (accessed(each) for each in (ours, theirs))
    assert 0 < found <= room * allowed
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    # Not less than optax's: the pads of two sums.
    assert 0 < taken <= allowed + max(allowed, 1.2e6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_all_reduce_of_many_leaves(dtype):
    """XLA for TPU puts 256 numbers in one at most; the leaves are more."""
    mesh = tpu.mesh_of("v5e:2x2")
    shapes = [jax.ShapeDtypeStruct((64, 128), dtype)] * 300
    ours = tpu.lowered(mesh, shapes, optclip.clip_by_global_norm(1.0))
    (count,) = numbers_sent(ours.compile())
    assert 0 < count <= 256
