"""Measure the cost of clipping the gradient of each example, for each method.

The model is a transformer of 5 million parameters; the batch has 32 examples of 64
tokens. Contenders take turns in random order. Times are CPU times of all threads, which
other programs disturb less than elapsed time. Memory is XLA's estimate of temporaries.

    pip install jax-privacy                    # optional, to measure it too
    python examples/private_cost.py            # some minutes on two cores
    python examples/private_cost.py --quick    # a smoke test
"""

import argparse
import functools
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from muon_cost import Size, times_of
from train_muon import init_params, mean_loss

from optclip.per_example import clipped_grad, norms

BOUND = 1.0


class Cost(NamedTuple):
    """Hold a compiled function, its compile time and its temporary memory."""

    run: Callable[[], Any]
    compile_seconds: float
    mib: float


def measured(size: Size) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the functions of parameters and windows to measure."""
    of_batch = functools.partial(mean_loss, features=size.features)

    def loss(params: Any, window: Any) -> Any:
        return of_batch(params, window[None])[0]

    def clipped(**options: Any) -> Any:
        return clipped_grad(loss, BOUND, **options)

    def plain(params: Any, windows: Any) -> Any:
        return jax.grad(of_batch, has_aux=True)(params, windows)[0]

    functions = {
        "plain gradient": plain,
        "vmap": clipped(),
        "microbatches of 1": clipped(microbatch_size=1),
        "microbatches of 4": clipped(microbatch_size=4),
        "ghost, only norms": norms(loss, method="ghost"),
        "ghost": clipped(method="ghost"),
    }
    try:
        jax_privacy = importlib.import_module("jax_privacy")
    except ModuleNotFoundError:
        print("jax_privacy: not installed")
        return functions
    sizes = {"vmap": None, "microbatches of 1": 1, "microbatches of 4": 4}
    for name, number in sizes.items():
        functions[f"jax_privacy, {name}"] = jax_privacy.clipped_grad(
            loss, l2_clip_norm=BOUND, keep_batch_dim=False, microbatch_size=number
        )
    return functions


def compiled(function: Callable[[Any, Any], Any], params: Any, windows: Any) -> Cost:
    start = time.process_time()
    program = jax.jit(function).lower(params, windows).compile()
    seconds = time.process_time() - start
    memory: Any = program.memory_analysis()

    def run() -> Any:
        return jax.block_until_ready(program(params, windows))

    return Cost(run, seconds, memory.temp_size_in_bytes / 2**20)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing")
    parser.add_argument("--quick", action="store_true", help="tiny model, two rounds")
    args = parser.parse_args(arguments)
    size, rounds = Size(256, 256, 10, 64, 64, 32), args.rounds
    size, rounds = (Size(16, 32, 1, 16, 8, 8), 2) if args.quick else (size, rounds)
    # jax_privacy 2.0.0 calls optax.global_norm, which optax has deprecated.
    warnings.filterwarnings("ignore", "optax.global_norm", DeprecationWarning)
    params = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    shape = (size.batch, size.window + 1)
    windows = np.random.default_rng(0).integers(size.letters, size=shape)
    costs = {name: compiled(f, params, windows) for name, f in measured(size).items()}
    times = times_of({name: cost.run for name, cost in costs.items()}, rounds)
    print(", ".join(f"{name} {n}" for name, n in size._asdict().items()))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    print(f"{'':<30} {'MiB':>7} {'s':>7} {'ratio':>8} {'compile, s':>10}")
    for name, cost in costs.items():
        pairs = zip(times[name], times["plain gradient"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        seconds = statistics.median(times[name])
        line = f"{name:<30} {cost.mib:7.1f} {seconds:7.3f} {ratio:8.2f}"
        print(f"{line} {cost.compile_seconds:10.1f}")


if __name__ == "__main__":
    main()
