"""Clip and AdamW on sharded trees, compiled for TPUs that need not be there."""

import re

import jax
import optax
import pytest
from jax.sharding import AxisType

import optclip
from benchmarks import ahead_of_time
from optclip import _roots


def transformer(dtype, num_layers=1, d=768):
    layer = [(d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d)]
    shapes = [(50_176, d), (100,), *layer * num_layers]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def program(mesh, clip, dtype):
    return ahead_of_time.lowered(mesh, transformer(dtype), clip).compile()


def numbers_sent(program):
    """How many float32 scalars each all-reduce has, on the way that is taken and off it.

    There is no other collective.
    """
    branch, entry = program.as_text().split("\nENTRY ")
    return _numbers_sent(entry), _numbers_sent(branch)


def _numbers_sent(text):
    found = ahead_of_time.collectives(text)
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
    """On the way that is taken, and one in the branch for norms out of range."""
    mesh = ahead_of_time.mesh_of(topology, kind)
    plain = program(mesh, optax.identity(), dtype)
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    assert numbers_sent(plain) == ([], [])
    assert [len(counts) for counts in numbers_sent(ours)] == [1, 1]
    assert len(re.findall(r" conditional\(", ours.as_text())) == 1
    room, their_room = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    # What the fusions of the branch pad, some 50 kB for a leaf.
    assert room <= their_room + 1.1e6


@pytest.mark.parametrize(
    ("topology", "kind", "dtype", "room"),
    [
        ("v5e:2x2", AxisType.Auto, "float32", 1.005),
        ("v5e:2x2", AxisType.Auto, "bfloat16", 1.005),
        ("v5e:2x2", AxisType.Explicit, "float32", 1.005),
        ("v5p:2x2x4", AxisType.Auto, "float32", 1.005),
        ("v5p:2x2x4", AxisType.Explicit, "bfloat16", 1.005),
        ("v5e:16x16", AxisType.Auto, "float32", 1.005),
        # Of 256 parts, 356 kB each: what small leaves take to be joined shows.
        ("v5e:16x16", AxisType.Auto, "bfloat16", 1.15),
        ("v5e:16x16", AxisType.Explicit, "bfloat16", 1.15),
    ],
)
def test_no_more_bytes_than_optax(topology, kind, dtype, room, monkeypatch):
    """Short of the branch, whose bytes XLA counts as if it were taken."""
    monkeypatch.setattr(_roots, "_may_leave_range", lambda *_: False)
    monkeypatch.setattr(_roots, "_compiled", _roots._compiled.__wrapped__)
    mesh = ahead_of_time.mesh_of(topology, kind)
    ours = program(mesh, optclip.clip_by_global_norm(1.0), dtype)
    theirs = program(mesh, optax.clip_by_global_norm(1.0), dtype)
    assert " conditional(" not in ours.as_text()
    accessed, allowed = (ahead_of_time.accessed(each) for each in (ours, theirs))
    assert 0 < accessed <= room * allowed
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    # Not less than optax's: the pads of more fusions, most on Explicit axes.
    explicit = kind is AxisType.Explicit
    assert 0 < taken <= allowed + (1.2e6 if explicit else 0.7e6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_all_reduce_of_many_leaves(dtype):
    """XLA for TPU puts 256 numbers in one at most; the leaves are more."""
    mesh = ahead_of_time.mesh_of("v5e:2x2")
    shapes = [jax.ShapeDtypeStruct((64, 128), dtype)] * 300
    ours = ahead_of_time.lowered(mesh, shapes, optclip.clip_by_global_norm(1.0))
    taken, off = numbers_sent(ours.compile())
    assert len(taken) == len(off) == 1
    assert 0 < max(taken + off) <= 128
