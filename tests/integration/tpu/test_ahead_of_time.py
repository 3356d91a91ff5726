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
def test_computed_gradients_are_not_stored(dtype):
    """Unscaled gradients are fused into the norm and the scaling, as in optax."""
    mesh, tree = ahead_of_time.tpus("v5e:2x2"), transformer(dtype)
    ours, theirs = (
        ahead_of_time.lowered(mesh, tree, optax.chain(optax.scale(2.0**-10), clip))
        for clip in CLIPS[1:]
    )
    ours, theirs = ours.compile(), theirs.compile()
    assert 0 < accessed(ours) <= 1.006 * accessed(theirs)
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    assert 0 < taken <= allowed + max(allowed, 1.2e6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skipping_and_clipping_share_one_all_reduce(dtype):
    """There is no branch, and no more bytes are accessed than by clipping alone."""
    mesh, tree = ahead_of_time.tpus("v5e:2x2"), transformer(dtype)
    scale = optax.scale(2.0**-10)
    lines = (
        optax.chain(scale, optclip.skip(CLIPS[1])),
        optax.chain(scale, optax.apply_if_finite(CLIPS[2], 3)),
        optax.chain(scale, CLIPS[1]),
    )
    ours, theirs, clipped = (
        ahead_of_time.lowered(mesh, tree, line).compile() for line in lines
    )
    assert len(numbers_sent(ours)) == 1
    assert " conditional(" not in ours.as_text()
    assert 0 < accessed(ours) <= min(1.006 * accessed(clipped), accessed(theirs))
    taken, allowed = (x.memory_analysis().temp_size_in_bytes for x in (ours, clipped))
    assert 0 < taken <= 2 * allowed
