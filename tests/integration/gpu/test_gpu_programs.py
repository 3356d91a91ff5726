"""Compile clipping and AdamW for an H100, without a GPU, and count the kernels."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from benchmarks import step, trees
from benchmarks.gpu import counts, launches, nodes, target
from optclip import recipes
from tests.support import ahead_of_time

NONE = optax.identity()
GLOBAL = optclip.clip_by_global_norm(1.0)
# Computes the norm, but skips no step.
SKIP = optclip.skip(optax.adamw(1e-4), max_norm=1e30)
OPTIMIZERS = {
    "skip": SKIP,
    "skip and clip": optclip.skip(optax.chain(GLOBAL, step.adamw())),
    "unscaled gradients": optax.chain(optax.scale(2.0**-10), GLOBAL, step.adamw()),
    "skip and history": optclip.with_history(
        optclip.skip(
            optax.chain(
                optclip.clip_by_global_norm(1.0, record="leaves"), step.adamw()
            ),
            record="leaves",
        )
    ),
    "history": optclip.with_history(
        optax.chain(optclip.clip_by_global_norm(1.0, record="leaves"), step.adamw())
    ),
}
# An AdamW step of GPT-2 with 148 leaves: the most kernels and kilobytes of temporary
# buffers. optax launches 351 kernels for the global norm, 350 for the block RMS, and
# for AGC 474 in float32 and 450 in bfloat16.
STEPS = {
    "unclipped": (NONE, "float32", 151, 39),
    "global norm": (GLOBAL, "float32", 219, 400),
    "skip": (NONE, "float32", 225, 400),
    # These compute the gradients that clipping reads. Stored, they are 498,000 kB.
    "skip and clip": (NONE, "float32", 232, 400),
    "unscaled gradients": (NONE, "float32", 222, 400),
    "skip and history": (NONE, "float32", 390, 400),
    "each leaf": (optclip.clip_by_norm(1.0), "float32", 88, 200),
    "value": (optclip.clip_by_value(1.0), "float32", 224, 1_000),
    "leaf norms": (
        optclip.clip_by_global_norm(1.0, record="leaves"), "float32", 225, 300,
    ),
    # The row of all metrics takes four kernels more than the leaf norms.
    "history": (NONE, "float32", 229, 300),
    "agc": (recipes.agc(0.01), "float32", 236, 2_200),
    "agc, bfloat16": (recipes.agc(0.01), "bfloat16", 236, 2_200),
}  # fmt: skip


def check_nothing_waits(text):
    """Assert that the program has no branch, loop or copy to the host."""
    kinds = launches.launched(text)
    assert not {"copy-start", "send", "outfeed", "infeed"} & kinds.keys()
    assert not any(f" {kind}(" in text for kind in launches.CALLING - {"call"})
    return kinds.total()


@pytest.mark.parametrize("name", STEPS)
def test_gpu_adamw_step_launches_and_updates_few_kernels(name):
    clip, dtype, most, kilobytes = STEPS[name]
    tree = trees.typed(trees.workloads(tiny=False)["gpt2"], dtype)
    program = counts.adamw_step(clip, tree, OPTIMIZERS.get(name))
    kernels = check_nothing_waits(program.text)
    assert 0 < kernels <= most
    # Only the loss has a new address in each step.
    assert nodes.updated(program.text, program.buffers) == 1
    assert 0 < program.temporaries <= 1e3 * kilobytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_training_step_with_skip_costs_less_than_with_optax(dtype):
    """The gradients of a transformer are computed and unscaled before clipping."""
    programs, kernels = [], []
    for optimizer in ahead_of_time.SKIPPING.values():
        run, shapes = ahead_of_time.training_step(optimizer(), dtype)
        programs.append(target.compiled(run, *target.placed(shapes), donate=(0, 1)))
        kernels.append(launches.launched(programs[-1].text).total())
    ours, theirs, unclipped = programs
    check_nothing_waits(ours.text)
    assert kernels[2] < kernels[0] < kernels[1]
    assert nodes.updated(ours.text, ours.buffers) == 1
    assert (
        0 < ours.temporaries <= 1.002 * min(theirs.temporaries, unclipped.temporaries)
    )


def mesh_of_8(kind=AxisType.Auto):
    gpus = np.array(target.devices("1x8x1")).reshape(1, 8)
    return Mesh(gpus, ("replica", "fsdp"), axis_types=(kind, kind))


def all_reduces(lowered):
    text = lowered.compile(compiler_options=target.WITHOUT_GPU).as_text()
    check_nothing_waits(text)
    kinds = [kind for _, kind in ahead_of_time.collectives(text)]
    assert set(kinds) <= {"all-reduce"}
    return len(kinds)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gpu_fsdp_step_adds_one_all_reduce(kind):
    shapes = [(50_176, 768), (100,), (768, 768), (768, 3072), (3072, 768)]
    tree = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    mesh = mesh_of_8(kind)
    rule = optclip.thresholds.quantile(0.9, 100)
    lines = {
        "unclipped": (NONE,),
        "clip": (GLOBAL,),
        "skip": (GLOBAL, optclip.skip),
        "learned": (
            optclip.clip_by_global_norm(rule, record="leaves"),
            lambda tx: optclip.skip(tx, max_norm=optclip.thresholds.scaled(rule, 3.0)),
        ),
    }
    numbers = [
        all_reduces(ahead_of_time.lowered(mesh, tree, *line)) for line in lines.values()
    ]
    assert numbers == [0, 1, 1, 1]


def test_gpu_data_parallel_step_adds_no_all_reduce():
    replicated, split = (NamedSharding(mesh_of_8(), P(*n)) for n in ((), ("fsdp",)))

    def count(optimizer):
        run, (*state, batch) = ahead_of_time.training_step(optimizer, "float32")
        shapes = *target.placed(state, replicated), target.placed(batch, split)
        return all_reduces(jax.jit(run, donate_argnums=(0, 1)).lower(*shapes))

    assert 0 < count(step.adamw()) == count(OPTIMIZERS["skip and clip"])
