"""What it costs to clip the gradient of each example, by each method, side by side.

A transformer of 5 million parameters, 32 examples of 64 tokens. The contenders take
turns in random order. Times are those of the CPU, of all threads, which other programs
disturb less than those of a clock; memory is that of temporaries, as XLA plans it.

    pip install jax-privacy                    # if it is to be measured too
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
    """A compiled function, what it took to compile, and the MiB that it needs."""

    run: Callable[[], Any]
    compile_seconds: float
    mib: float


def functions(size: Size) -> dict[str, Callable[[Any, Any], Any]]:
    """What is measured, each a function of parameters and windows."""
    of_batch = functools.partial(mean_loss, features=size.features)

    def loss(params: Any, window: Any) -> Any:
        return of_batch(params, window[None])[0]

    def ours(**options: Any) -> Any:
        return clipped_grad(loss, BOUND, **options)

    def plain(params: Any, windows: Any) -> Any:
        return jax.grad(of_batch, has_aux=True)(params, windows)[0]

    found = {
        "plain gradient": plain,
        "vmap": ours(),
        "microbatches of 1": ours(microbatch_size=1),
        "microbatches of 4": ours(microbatch_size=4),
        "ghost, norms alone": norms(loss, method="ghost"),
        "ghost": ours(method="ghost"),
    }
    try:
        other = importlib.import_module("jax_privacy")
    except ModuleNotFoundError:
        print("jax_privacy: not installed")
        return found
    sizes = {"vmap": None, "microbatches of 1": 1, "microbatches of 4": 4}
    for name, number in sizes.items():
        found[f"jax_privacy, {name}"] = other.clipped_grad(
            loss, l2_clip_norm=BOUND, keep_batch_dim=False, microbatch_size=number
        )
    return found


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
    parser.add_argument("--rounds", type=int, default=15, help="times of each")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    args = parser.parse_args(arguments)
    size, rounds = Size(256, 256, 10, 64, 64, 32), args.rounds
    size, rounds = (Size(16, 32, 1, 16, 8, 8), 2) if args.quick else (size, rounds)
    # jax_privacy 2.0.0 takes the norm of an example by a name that optax has replaced.
    warnings.filterwarnings("ignore", "optax.global_norm", DeprecationWarning)
    params = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    shape = (size.batch, size.window + 1)
    windows = np.random.default_rng(0).integers(size.letters, size=shape)
    found = functions(size)
    costs = {name: compiled(f, params, windows) for name, f in found.items()}
    times = times_of({name: cost.run for name, cost in costs.items()}, rounds)
    print(", ".join(f"{name} {n}" for name, n in size._asdict().items()))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    print(f"{'':<30} {'MiB':>7} {'s':>7} {'of plain':>8} {'to compile':>10}")
    for name, cost in costs.items():
        pairs = zip(times[name], times["plain gradient"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        seconds = statistics.median(times[name])
        line = f"{name:<30} {cost.mib:7.1f} {seconds:7.3f} {ratio:8.2f}"
        print(f"{line} {cost.compile_seconds:10.1f}")


if __name__ == "__main__":
    main()
