"""One process of a training run that spans several; `test_processes.py` starts them.

    python -m tests.integration.processes.training_process '{"process": 0, "count": 2, "port": 9000, ...}'

The main job's network, its parameters and momentum split over all devices of all
processes. It starts from the last checkpoint in its folder, if there is one.
"""

import functools
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding

import optclip
from examples import train_char_rnn

STEPS, SAVE_AT, LEARNING_RATE = 6, 3, 1.0
# Letters: each more is a round of messages between the processes.
WINDOW = 9
# One process after so many seconds of silence from another ends too; a busy machine may
# keep a living one silent, so where none is to die it is longer.
HEARTBEAT, PATIENCE = 20, 100


class Config(NamedTuple):
    """What a process is told."""

    process: int
    count: int
    port: int
    folder: str
    die_at: int = -1  # at this step process 1 is gone, without a word


def optimizer() -> Any:
    """A clip with a memory and one with none, and the momentum of the main job."""
    return optax.chain(
        optclip.recipes.zclip(warmup=2, max_norm=0.25),
        optclip.clip_by_norm(0.2, name="by_leaf"),
        optax.sgd(LEARNING_RATE, momentum=train_char_rnn.MOMENTUM),
    )


def placed(mesh: Any, shape: tuple[int, ...]) -> NamedSharding:
    """Split over the first axis that all devices divide, as FSDP does."""
    spec = [None] * len(shape)
    for axis, size in enumerate(shape):
        if size and size % mesh.size == 0:
            spec[axis] = mesh.axis_names[0]
            break
    return NamedSharding(mesh, P(*spec))


def start(mesh: Any, letters: int) -> Any:
    """Parameters and optimizer state, made where they belong."""

    def made() -> Any:
        params = train_char_rnn.init_params(jax.random.key(0), letters)
        return params, optimizer().init(params)

    places = jax.tree.map(lambda x: placed(mesh, x.shape), jax.eval_shape(made))
    return jax.jit(made, out_shardings=places)()


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def advance(carry: Any, step: Any, mesh: Any, text: jax.Array) -> tuple[Any, Any]:
    """One step on a batch that is split over all devices."""
    params, opt_state = carry
    key = jax.random.fold_in(jax.random.key(1), step)
    windows = train_char_rnn.draw_windows(text, key)[:, :WINDOW]
    windows = jax.lax.with_sharding_constraint(windows, NamedSharding(mesh, P("data")))
    loss, grads = jax.value_and_grad(train_char_rnn.mean_loss)(params, windows)
    updates, opt_state = optimizer().update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    carry = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, placed(mesh, x.shape)),
        (params, opt_state),
    )
    return carry, (loss, optclip.metrics(opt_state)["clip/norm"])


def train(config: Config) -> None:
    """Train to the end, save once on the way, leave the result to process 0."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    corpus = train_char_rnn.read_corpus()
    carry = start(mesh, len(corpus.alphabet))
    folder = pathlib.Path(config.folder)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    seen = []
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            carry = manager.restore(first, args=ocp.args.StandardRestore(carry))
        for step in range(first, STEPS):
            if step == config.die_at and config.process == 1:
                os._exit(17)
            carry, told = advance(carry, step, mesh, np.asarray(corpus.train))
            seen.append([float(x) for x in told])
            if step + 1 == SAVE_AT:
                manager.save(SAVE_AT, args=ocp.args.StandardSave(carry))
    split = sum(not x.is_fully_replicated for x in jax.tree.leaves(carry))
    whole = multihost_utils.process_allgather(carry, tiled=True)
    if config.process == 0:
        leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(whole))}
        np.savez(folder / "result.npz", seen=np.array(seen), split=split, **leaves)


def main(given: str) -> None:
    config = Config(**json.loads(given))
    jax.config.update("jax_num_cpu_devices", 2)
    if config.count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}", config.count, config.process,
            heartbeat_timeout_seconds=HEARTBEAT if config.die_at >= 0 else PATIENCE,
            initialization_timeout=300,
        )  # fmt: skip
    train(config)


if __name__ == "__main__":
    main(sys.argv[1])
