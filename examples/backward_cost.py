"""Measure the time and memory of `clip_cotangent` in each time step of a GRU.

Computes the gradient of a scan of 512 steps, with and without clipping the cotangent of
the state. Contenders take turns in random order, and ratios are computed per round.
Times are CPU times of all threads, which other programs disturb less than elapsed time.

    python examples/backward_cost.py            # some minutes on two cores
    python examples/backward_cost.py --quick    # a smoke test
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optclip

Clip = Callable[[jax.Array], jax.Array]
CLIPS: dict[str, Clip] = {
    "unclipped": lambda h: h,
    "per example": lambda h: optclip.clip_cotangent(h, 1e-3),
    "whole state": lambda h: optclip.clip_cotangent(h, 1e-3, axis=None),
    "per element": lambda h: optclip.clip_cotangent(h, 1e-3, axis=()),
    "twice the median": lambda h: optclip.clip_cotangent(h, 2.0, relative="median"),
}


def gradient_of(clip: Clip, params: Any, inputs: jax.Array) -> Any:
    """Compile the gradient of a GRU's loss with respect to its parameters."""

    def step(params: Any, h: jax.Array, x: jax.Array) -> jax.Array:
        of_x, of_h = x @ params["x"], h @ params["h"]
        gates = (of_x + of_h)[:, : 2 * h.shape[1]]
        keep, reset = jnp.split(jax.nn.sigmoid(gates), 2, axis=1)
        new = jnp.tanh(of_x[:, -h.shape[1] :] + reset * of_h[:, -h.shape[1] :])
        return clip(keep * h + (1 - keep) * new)

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        start = jnp.zeros(inputs.shape[1:])
        h, _ = jax.lax.scan(lambda h, x: (step(params, h, x), None), start, inputs)
        return jnp.sum(h**2)

    return jax.jit(jax.grad(loss)).lower(params, inputs).compile()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing")
    parser.add_argument("--quick", action="store_true", help="tiny network, two rounds")
    args = parser.parse_args(arguments)
    steps, batch, units = (8, 2, 4) if args.quick else (512, 32, 256)
    rounds = 2 if args.quick else args.rounds
    rng = np.random.default_rng(0)
    shape = units, 3 * units
    params = {name: jnp.asarray(rng.normal(size=shape) * units**-0.5) for name in "xh"}
    params, inputs = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        (params, rng.normal(size=(steps, batch, units))),
    )
    programs = {name: gradient_of(c, params, inputs) for name, c in CLIPS.items()}
    times: dict[str, list[float]] = {name: [] for name in CLIPS}
    for _ in range(rounds):
        for name in rng.permutation([*programs]):
            start = time.process_time()
            jax.block_until_ready(programs[name](params, inputs))
            times[name].append(time.process_time() - start)
    print(f"{steps} steps of a GRU, {batch} examples, {units} units")
    print(f"{'':<17} {'time':>10} {'ratio':>6} {'memory':>13}")
    plain = programs["unclipped"].memory_analysis().temp_size_in_bytes
    for name, seconds in times.items():
        pairs = zip(seconds, times["unclipped"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        memory = programs[name].memory_analysis().temp_size_in_bytes - plain
        milliseconds = 1e3 * statistics.median(seconds)
        print(f"{name:<17} {milliseconds:7.1f} ms {ratio:6.3f} {memory:+7d} bytes")


if __name__ == "__main__":
    main()
