"""Compile clipping and AdamW on sharded trees for TPUs, without a TPU."""

import re

import jax
import optax
import pytest
from jax.sharding import AxisType

import optclip
from tests.support import ahead_of_time


def transformer(dtype):
    d = 768
    layer = [(d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d)]
    shapes = [(50_176, d), (100,), *layer]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


CLIPS = (
    optax.identity(),
    optclip.clip_by_global_norm(1.0),
    optax.clip_by_global_norm(1.0),
)


def accessed(program):
    """Return the bytes that a step accesses on one chip, as XLA estimates."""
    return program.cost_analysis()["bytes accessed"]


def numbers_sent(program):
    """Return the number of float32 scalars of each all-reduce, the only collective."""
    collectives = ahead_of_time.collectives(program.as_text())
    assert {kind for _, kind in collectives} <= {"all-reduce"}
    counts = []
    for shapes, _ in collectives:
        sizes = re.findall(r"([a-z]+\d+)\[(\d*)\]", shapes)
        assert all(name == "f32" and size in ("", "1") for name, size in sizes)
        counts.append(len(sizes))
    return counts


@pytest.mark.parametrize(
    ("topology", "kind", "dtype", "room"),
    [
        # Reading the old record, which is written in place, takes part of the room.
        ("v5e:2x2", AxisType.Explicit, "float32", 1.006),
        ("v5p:2x2x4", AxisType.Auto, "float32", 1.006),
        # Each of 256 shards has only 356 kB, so merging small leaves matters.
        ("v5e:16x16", AxisType.Auto, "bfloat16", 1.15),
    ],
)
def test_clipping_adds_one_all_reduce_and_no_pass(topology, kind, dtype, room):
    """The plain and the overflow-safe sum share both; there is no branch."""
    mesh, tree = ahead_of_time.tpus(topology, kind), transformer(dtype)
    plain, ours, theirs = (
        ahead_of_time.lowered(mesh, tree, c).compile() for c in CLIPS
    )
    assert numbers_sent(plain) == []
    assert len(numbers_sent(ours)) == 1
    assert " conditional(" not in ours.as_text()
    size, allowed = (accessed(each) for each in (ours, theirs))
    assert 0 < size <= room * allowed
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    # The second sum adds padding.
    assert 0 < taken <= allowed + max(allowed, 1.2e6)


def test_clipping_many_leaves_adds_one_all_reduce():
    """XLA for TPU merges at most 256 numbers; there are more leaves."""
    mesh = ahead_of_time.tpus("v5e:2x2")
    shapes = [jax.ShapeDtypeStruct((64, 128), "float32")] * 300
    ours = ahead_of_time.lowered(mesh, shapes, optclip.clip_by_global_norm(1.0))
    (count,) = numbers_sent(ours.compile())
    assert 0 < count <= 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_step_with_skip_costs_less_than_with_optax(dtype):
    """Unscaled gradients are not stored, and skipping shares the norm of clipping."""
    mesh, programs = ahead_of_time.tpus("v5e:2x2"), []
    for optimizer in ahead_of_time.SKIPPING.values():
        run, shapes = ahead_of_time.training_step(optimizer(), dtype)
        shapes = ahead_of_time.all_placed(mesh, shapes)
        with jax.set_mesh(mesh):
            lowered = jax.jit(run, donate_argnums=(0, 1)).lower(*shapes)
        programs.append(lowered.compile())
    ours, theirs, plain = programs
    # XLA merges the all-reduce of clipping with others in bfloat16.
    sent = [len(re.findall(r" all-reduce(-start)?\(", x.as_text())) for x in programs]
    assert 0 < sent[0] <= min(sent[1] - 1, sent[2] + 1)
    assert " conditional(" not in ours.as_text()
    assert 0 < accessed(ours) <= min(1.02 * accessed(plain), accessed(theirs))
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, plain))
    assert 0 < taken <= allowed + 1.2e6
