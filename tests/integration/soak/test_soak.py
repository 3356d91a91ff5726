"""Run many steps: no drift from float64, no growth of the state, no retrace."""

import gc
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optclip
from optclip import thresholds
from tests.support import rules

STEPS = 100_000
SIZES = {"a": (4, 2), "b": (8,), "c": (2, 2)}
RATIO, DECAY, WINDOW, Q = 1.05, 0.98, 16, 0.5
ROOT = pathlib.Path(__file__).parents[3]


def optimizer(rule):
    return optclip.clip_by_norm(rule, record="leaves")


RULES = {
    "ema": thresholds.ema(RATIO, DECAY, warmup=0),
    "quantile": thresholds.quantile(Q, WINDOW),
}


def factors(num_steps):
    """Return the size of the gradients of each step: a slow wave, noise and spikes."""
    random = np.random.default_rng(0)
    wave = 2 + np.sin(np.arange(num_steps) / 500)
    spikes = np.where(random.random(num_steps) < 0.01, 20.0, 1.0)
    sizes = wave * random.uniform(0.8, 1.25, num_steps) * spikes
    return sizes.astype(np.float32)


def gradients(size):
    """Return gradients whose leaves have norms of 1, 2 and 3 times `size`."""
    return {
        name: jnp.full(shape, (i + 1) * size / np.sqrt(np.prod(shape)), jnp.float32)
        for i, (name, shape) in enumerate(SIZES.items())
    }


def assert_thresholds(rule, measured, sizes):
    """Compare thresholds of all leaves, and require that some steps were clipped."""
    ema, quantile = rules.AdaGC(RATIO, DECAY, 0, 1.0), rules.AutoClip(Q, WINDOW)
    oracle = quantile if rule == "quantile" else ema
    expected = np.array([oracle.step(size) for size in sizes.astype(np.float64)])
    for i, name in enumerate(SIZES):
        np.testing.assert_allclose(measured[name], (i + 1) * expected, rtol=2e-5)
    assert 0.2 < np.mean(sizes > expected) < 0.8 or rule == "ema"
    assert np.any(sizes > expected)


def run_loop(rule, first, last, devices, checkpoint):
    """Take steps in a Python loop on a mesh, from a checkpoint if there is one."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    places = {"a": rows, "b": rows, "c": whole}
    tx, traces = optimizer(RULES[rule]), []

    @jax.jit
    def update(size, state):
        traces.append(1)
        grads = jax.lax.with_sharding_constraint(gradients(size), places)
        _, state = tx.update(grads, state)
        return state

    state = jax.device_put(tx.init(gradients(1.0)), whole)
    if first:
        state = serialization.from_bytes(state, checkpoint.read_bytes())
        state = jax.device_put(state, whole)
    kinds = jax.tree.map(jax.typeof, state)
    limits_of_steps, num_arrays = [], 0
    for i, size in enumerate(factors(STEPS)[first:last]):
        state = update(size, state)
        # Waits for each step: thousands of queued collectives starve on few cores.
        limits = jax.device_get(state.clip_record["clip"].clip_threshold)
        limits_of_steps.append(limits)
        if i == 100:
            gc.collect()
            num_arrays = len(jax.live_arrays())
    gc.collect()
    growth = len(jax.live_arrays()) - num_arrays
    checkpoint.write_bytes(serialization.to_bytes(state))
    names = list(SIZES)
    return {
        "thresholds": {n: [float(x[n]) for x in limits_of_steps] for n in names},
        "traces": len(traces),
        "growth": growth,
        "is_same_type": kinds == jax.tree.map(jax.typeof, state),
        "num_bytes": checkpoint.stat().st_size,
    }


@pytest.mark.parametrize("rule", RULES)
def test_loop_with_restart_on_other_devices_follows_float64(rule, tmp_path):
    """Each half runs in a separate process, on four devices and then on two."""
    half, parts = STEPS // 2, []
    for first, last, devices in ((0, half, 4), (half, STEPS, 2)):
        config = [rule, first, last, devices, str(tmp_path / "state")]
        output = subprocess.run(
            [sys.executable, "-m", "tests.integration.soak.test_soak", *map(str, config)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        parts.append(json.loads(output.splitlines()[-1]))
    for part in parts:
        assert part["traces"] == 1
        assert part["growth"] <= 0
        assert part["is_same_type"]
    assert parts[0]["num_bytes"] == parts[1]["num_bytes"]
    limits = {n: parts[0]["thresholds"][n] + parts[1]["thresholds"][n] for n in SIZES}
    assert_thresholds(rule, limits, factors(STEPS))


if __name__ == "__main__":
    rule, *numbers, checkpoint = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(numbers[2]))
    print(json.dumps(run_loop(rule, *map(int, numbers), pathlib.Path(checkpoint))))
