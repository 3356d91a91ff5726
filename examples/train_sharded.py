"""Train a character RNN on eight devices and on one, and compare the runs.

Parameters, gradients and momentum are sharded over a mesh of 4 x 2 devices: rows over
`data`, as in FSDP, and columns over `model`, as in tensor parallelism. Batches are
sharded over `data`. The optimizer has no code for several devices: the norm covers the
whole tree, because XLA inserts an all-reduce for sharded gradients.

    python examples/train_sharded.py            # a minute; simulates 8 devices on a CPU
    python examples/train_sharded.py --quick    # a smoke test
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import train_char_rnn
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import optclip

DEVICES = 8
LEARNING_RATE = 1.0
SHAPE, AXES = (4, 2), ("data", "model")
# The axes over which each parameter is sharded.
SPECS = {
    "embed": P(None, "model"),
    "recur": P("data", "model"),
    "bias": P("model"),
    "head": P("data"),
    "head_bias": P(),
}
BATCH = P("data")


class Log(NamedTuple):
    """Hold the metrics of a step."""

    loss: jax.Array
    norm: jax.Array
    coefficient: jax.Array


def optimizer() -> optax.GradientTransformationExtraArgs:
    """Build the optimizer, the same as for one device."""
    return optax.chain(
        optclip.clip_by_global_norm(0.25),
        optax.sgd(LEARNING_RATE, momentum=train_char_rnn.MOMENTUM),
    )


def mesh_of(devices: int) -> Mesh:
    shape = SHAPE if devices == DEVICES else (1, 1)
    return jax.make_mesh(
        shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )


def train(devices: int, steps: int) -> tuple[list[Log], dict[str, Any]]:
    """Train on `devices` devices; return the logs and the shapes of shards."""
    mesh = mesh_of(devices)
    corpus = train_char_rnn.read_corpus()
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = train_char_rnn.init_params(jax.random.key(0), len(corpus.alphabet))
    params = jax.device_put(params, shardings)
    # The momentum is sharded like the parameters.
    opt_state = optimizer().init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, windows: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(train_char_rnn.mean_loss)(params, windows)
        updates, opt_state = optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = optclip.metrics(opt_state)
        log = Log(loss, metrics["clip/norm"], metrics["clip/coefficient"])
        return jax.lax.with_sharding_constraint(params, shardings), opt_state, log

    logs = []
    for key in jax.random.split(jax.random.key(1), steps):
        windows = train_char_rnn.draw_windows(corpus.train, key)
        windows = jax.device_put(windows, NamedSharding(mesh, BATCH))
        params, opt_state, log = step(params, opt_state, windows)
        # Waits for each step, since simulated devices on one CPU slow each other down.
        logs.append(jax.device_get(log))
    shards = {name: x.sharding.shard_shape(x.shape) for name, x in params.items()}
    return logs, shards


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    args = parser.parse_args(arguments)
    # Must be set before JAX initializes its devices; no effect on GPU and TPU.
    jax.config.update("jax_num_cpu_devices", DEVICES)
    steps = 5 if args.quick else args.steps
    split, shards = train(DEVICES, steps)
    alone, _ = train(1, steps)
    for name, shape in shards.items():
        print(f"{name:<10} {SPECS[name]!s:<20} each device holds {shape}")
    print(f"\n{'step':>4} {'loss':>20} {'norm':>20} {'coefficient':>20}")
    for i in range(0, steps, max(1, steps // 10)):
        pairs = [f"{a:9.5f} {b:9.5f}" for a, b in zip(split[i], alone[i], strict=True)]
        print(f"{i:>4} " + "  ".join(pairs))
    print(f"\nEach column shows {DEVICES} devices, then one.")
    apart = max(abs(a.norm / b.norm - 1) for a, b in zip(split, alone, strict=True))
    first = abs(split[0].norm / alone[0].norm - 1)
    print(f"The norms of the first step differ by {first:.0e}, later ones by up to")
    print(
        f"{apart:.0e}: sums differ in rounding, and training amplifies the difference."
    )
    assert np.isfinite(apart)
    assert first < 1e-5


if __name__ == "__main__":
    main()
