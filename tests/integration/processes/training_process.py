"""Run one process of a distributed training run; `test_processes.py` starts them.

    python -m tests.integration.processes.training_process '{"process": 0, "count": 2, "port": 9000, ...}'

Trains the network of `examples/train_char_rnn.py`, with parameters and momentum sharded
over all devices of all processes. Starts from the last checkpoint in its folder, if
any.
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
from jax.sharding import AxisType, Mesh, NamedSharding

import optclip
from examples import train_char_rnn

STEPS, SAVE_AT, LEARNING_RATE = 6, 3, 1.0
# Each letter adds a round of messages between the processes.
WINDOW = 9
# Seconds without a heartbeat after which the processes end: if one is to die, and if
# not. On a busy machine, heartbeats may be late.
SHORT_TIMEOUT, LONG_TIMEOUT = 20, 100


class Config(NamedTuple):
    """Hold the configuration of a process. All processes together have 8 devices."""

    process: int
    count: int
    port: int
    folder: str
    die_at: int = -1  # process 1 exits at this step


def optimizer() -> Any:
    """Skip bad steps, with a history, around clipping with a memory and without one."""
    chain = optax.chain(
        optclip.recipes.zclip(warmup=2, max_norm=0.25, record="leaves"),
        optclip.clip_by_norm(0.2, name="by_leaf"),
        optax.sgd(LEARNING_RATE, momentum=train_char_rnn.MOMENTUM),
    )
    max_norm = optclip.thresholds.scaled(optclip.thresholds.quantile(0.9, 4), 100.0)
    return optclip.with_history(optclip.skip(chain, max_norm=max_norm), STEPS)


def placed(mesh: Any, shape: tuple[int, ...]) -> NamedSharding:
    """Shard the first axis that divides evenly, as FSDP does."""
    spec = [None] * len(shape)
    for axis, size in enumerate(shape):
        if size and size % mesh.size == 0:
            spec[axis] = mesh.axis_names[0]
            break
    return NamedSharding(mesh, P(*spec))


def start(mesh: Any, letters: int) -> Any:
    """Initialize parameters and optimizer state with their shardings."""

    def init() -> Any:
        params = train_char_rnn.init_params(jax.random.key(0), letters)
        return params, optimizer().init(params)

    places = jax.tree.map(lambda x: placed(mesh, x.shape), jax.eval_shape(init))
    return jax.jit(init, out_shardings=places)()


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def advance(carry: Any, step: Any, mesh: Any, text: jax.Array) -> tuple[Any, Any, Any]:
    """Take one step on a batch that is sharded over all devices."""
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
    return carry, (loss, optclip.metrics(opt_state)["clip/norm"]), grads


def train(config: Config) -> None:
    """Train to the end and save once; process 0 writes the result.

    The norms of the first step, also after a restart, are compared with the gradients.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    corpus = train_char_rnn.read_corpus()
    carry = start(mesh, len(corpus.alphabet))
    folder = pathlib.Path(config.folder)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    log, ratios, saved = [], [], []
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            carry = manager.restore(first, args=ocp.args.StandardRestore(carry))
            saved = whole(carry[1])
        for step in range(first, STEPS):
            if step == config.die_at and config.process == 1:
                os._exit(17)
            carry, logged, grads = advance(carry, step, mesh, np.asarray(corpus.train))
            if step == first:
                check = optclip.check_norms(carry[1], grads, name="clip")
                assert check.ok, str(check)
                ratios = [check.total, *check.ratios.values()]
            log.append([float(x) for x in logged])
            if step + 1 == SAVE_AT:
                manager.save(SAVE_AT, args=ocp.args.StandardSave(carry))
                saved = whole(carry[1])
    split = sum(not x.is_fully_replicated for x in jax.tree.leaves(carry))
    arrays = {
        **{f"saved_{i}": x for i, x in enumerate(saved)},
        **{str(i): x for i, x in enumerate(whole(carry))},
    }
    if config.process == 0:
        results = {"log": np.array(log), "ratios": np.array(ratios), "split": split}
        np.savez(folder / "result.npz", **results, **arrays)


def check_stages() -> None:
    """Compare the norms of two stages, each on the devices of one process."""

    def on(process: int, tree: Any) -> Any:
        devices = [x for x in jax.devices() if x.process_index == process]
        place = NamedSharding(Mesh(np.array(devices), ("stage",)), P())
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, place, lambda i: np.asarray(x)[i], dtype=x.dtype
            ),
            tree,
        )

    tx = optclip.clip_by_global_norm(1.0, record="leaves")
    grads = {"w": np.arange(1, 5, dtype=np.float32)}
    state = tx.update(grads, tx.init(grads))[1]
    stages = [0, jax.process_count() - 1]
    check = optclip.check_norms(
        [on(i, state) for i in stages], [on(i, grads) for i in stages]
    )
    assert not check.disagreements
    np.testing.assert_allclose([*check.ratios.values()], 1, rtol=1e-6)
    np.testing.assert_allclose(check.total, 0.5, rtol=1e-6)


def whole(tree: Any) -> list[Any]:
    """Return the leaves of a tree in NumPy."""
    gathered = multihost_utils.process_allgather(tree, tiled=True)
    return [np.asarray(x) for x in jax.tree.leaves(gathered)]


def main(text: str) -> None:
    config = Config(**json.loads(text))
    jax.config.update("jax_num_cpu_devices", 8 // config.count)
    if config.count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}", config.count, config.process,
            heartbeat_timeout_seconds=(
                SHORT_TIMEOUT if config.die_at >= 0 else LONG_TIMEOUT
            ),
            initialization_timeout=300,
        )  # fmt: skip
    check_stages()
    train(config)


if __name__ == "__main__":
    main(sys.argv[1])
