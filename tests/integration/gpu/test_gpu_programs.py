"""Compile clipping and AdamW for an H100, without a GPU, and count the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from benchmarks import step, stepping, tpu, trees
from benchmarks.gpu import launches, nodes, target
from optclip import recipes

ADAMW = optax.adamw(1e-4)
NONE = optax.identity()
GLOBAL = optclip.clip_by_global_norm(1.0)
# An AdamW step of GPT-2: the transformation, and the most kernels, nodes to update and
# kilobytes of temporary buffers. optax launches 351 kernels for the global norm, 350
# for the block RMS, 474 for AGC and 450 in bfloat16.
STEPS = {
    "unclipped": (NONE, "float32", 151, 1, 39),
    "global norm": (GLOBAL, "float32", 325, 163, 1_000),
    "skip": (None, "float32", 326, 163, 1_000),
    "each leaf": (optclip.clip_by_norm(1.0), "float32", 350, 28, 1_000),
    "value": (optclip.clip_by_value(1.0), "float32", 449, 168, 2_000),
    "leaf norms": (
        optclip.clip_by_global_norm(1.0, record="leaves"), "float32", 412, 263, 1_000,
    ),
    "agc": (recipes.agc(0.01), "float32", 474, 20, 11_000),
    "agc, bfloat16": (recipes.agc(0.01), "bfloat16", 477, 20, 11_000),
}  # fmt: skip


def adamw_step(clip, dtype):
    """Compile a step whose gradients are arguments and whose state is donated."""
    optimizer = ADAMW
    if clip is None:
        # No step is skipped. XLA would not compute the norm for a limit of inf.
        clip, optimizer = NONE, optclip.skip(ADAMW, max_norm=1e30)
    params = trees.typed(trees.workloads(tiny=False)["gpt2"], dtype)
    state = params, jax.eval_shape(optimizer.init, params)
    run = stepping.step_of(clip, optimizer, step.SOURCES["arguments"])
    shapes = state, jax.eval_shape(clip.init, params), params, jnp.ones(())
    return target.compiled(run, *target.placed(shapes), donate=(0, 1))


def check_nothing_waits(text):
    """Assert that the program has no branch, loop or copy to the host."""
    kinds = launches.launched(text)
    assert not {"copy-start", "send", "outfeed", "infeed"} & kinds.keys()
    assert not any(f" {kind}(" in text for kind in launches.CALLING - {"call"})
    return kinds.total()


@pytest.mark.parametrize("name", STEPS)
def test_gpu_adamw_step_launches_and_updates_few_kernels(name):
    clip, dtype, most, most_updated, kilobytes = STEPS[name]
    program = adamw_step(clip, dtype)
    kernels = check_nothing_waits(program.text)
    assert 0 < kernels <= most
    assert nodes.updated(program.text, program.buffers) <= most_updated
    assert 0 < program.temporaries <= 1e3 * kilobytes


def mesh_of_8(kind=AxisType.Auto):
    gpus = np.array(target.devices("1x8x1")).reshape(1, 8)
    return Mesh(gpus, ("replica", "fsdp"), axis_types=(kind, kind))


def all_reduces(lowered):
    text = lowered.compile(compiler_options=target.WITHOUT_GPU).as_text()
    check_nothing_waits(text)
    kinds = [kind for _, kind in tpu.collectives(text)]
    assert set(kinds) <= {"all-reduce"}
    return len(kinds)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gpu_fsdp_step_adds_one_all_reduce(kind):
    shapes = [(50_176, 768), (100,), (768, 768), (768, 3072), (3072, 768)]
    tree = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    mesh = mesh_of_8(kind)
    counts = [all_reduces(tpu.lowered(mesh, tree, clip)) for clip in (NONE, GLOBAL)]
    assert counts == [0, 1]


def test_gpu_data_parallel_step_adds_no_all_reduce():
    mesh = mesh_of_8()
    replicated, split = (NamedSharding(mesh, P(*name)) for name in ((), ("fsdp",)))
    weights = [jnp.ones((256, 256))] * 3
    batch = jax.ShapeDtypeStruct((64, 256), "float32", sharding=split)

    def loss(weights, batch):
        for each in weights:
            batch = jnp.tanh(batch @ each)
        return jnp.mean(batch**2)

    def count(clip):
        run = stepping.step_of(clip, ADAMW, jax.value_and_grad(loss))
        shapes = (weights, ADAMW.init(weights)), clip.init(weights)
        placed = target.placed(shapes, replicated)
        return all_reduces(jax.jit(run, donate_argnums=(0, 1)).lower(*placed, batch))

    unclipped = count(NONE)
    assert unclipped > 0
    assert count(GLOBAL) == unclipped
