"""Lower a clipped AdamW step for a mesh of devices that this machine does not have."""

import os
import re

# Keeps this process from searching for a TPU.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from benchmarks import step, stepping, train, trees

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def tpus(topology, kind=AxisType.Auto):
    """Return a mesh of all chips of a topology, over which leaves are sharded."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    devices = np.array(chips).reshape(1, -1)
    return Mesh(devices, ("replica", "fsdp"), axis_types=(kind, kind))


def placed(mesh, shape, dtype):
    """Shard the first axis that divides evenly, as in FSDP, or replicate."""
    chips = mesh.shape["fsdp"]
    first = next((i for i, n in enumerate(shape) if n and n % chips == 0), None)
    spec = P(*("fsdp" if i == first else None for i in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def all_placed(mesh, shapes):
    return jax.tree.map(lambda x: placed(mesh, x.shape, x.dtype), shapes)


def lowered(mesh, shapes, clip, wrap=lambda tx: tx):
    """Lower a clipped AdamW step with donated state; `shapes` are the gradients'."""
    tx = wrap(optax.chain(clip, optax.adamw(1e-3)))

    def step(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        tree, state = all_placed(mesh, (shapes, jax.eval_shape(tx.init, shapes)))
        return jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree)


def collectives(text):
    """Return the result type and the kind of each collective operation."""
    return re.findall(rf"= (\S.*?) ({COLLECTIVES})(?:-start)?\(", text)


# The recommended line, and the nearest one of optax alone.
SKIPPING = {
    "optclip": lambda: optclip.skip(
        optax.chain(optclip.clip_by_global_norm(1.0), step.adamw())
    ),
    "optax": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), step.adamw()), 3
    ),
    "unclipped": step.adamw,
}


def training_step(optimizer, dtype):
    """Return a step of a small GPT-2 that unscales its gradients, and its shapes."""
    unscale = optax.scale(2.0**-10)
    gradients = jax.value_and_grad(lambda *args: 2.0**10 * train.loss(*args))
    params = trees.typed(trees.gpt2(256, 1, 8192, positions=128), dtype)
    tokens = jax.ShapeDtypeStruct((8, 129), "int32")
    run = stepping.step_of(unscale, optimizer, gradients)
    state = params, jax.eval_shape(optimizer.init, params)
    return run, (state, unscale.init(params), tokens)
