"""Benchmark `compile`: CPU seconds to trace, lower and compile, without a cache.

Each compilation runs in a process of its own, and contenders take turns. CPU time
depends less on other work of the machine than elapsed time. Lines of the optimized
program do not depend on it; tests limit them.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

import optclip
from benchmarks import skip, trees
from benchmarks.timing import Row
from optclip import recipes


class Case(NamedTuple):
    tree: str
    optimizer: str
    clip: str


BLOCK_RMS = partial(optax.clip_by_block_rms, 1.0)
# Each optclip transformation with its nearest counterpart in optax.
CLIPS: dict[str, dict[str, Callable[[], Any]]] = {
    "none": {"unclipped": optax.identity},
    "global norm": {
        "optclip": partial(optclip.clip_by_global_norm, 1.0),
        "optax": partial(optax.clip_by_global_norm, 1.0),
    },
    "leaf": {"optclip": partial(optclip.clip_by_norm, 1.0), "optax": BLOCK_RMS},
    "agc": {"optclip": recipes.agc, "optax": partial(optax.adaptive_grad_clip, 0.01)},
    "adagc": {"optclip": recipes.adagc, "optax": BLOCK_RMS},
    "skip": {
        "optclip": lambda: optclip.skip(optclip.clip_by_global_norm(1.0)),
        "optax": lambda: optax.apply_if_finite(optax.clip_by_global_norm(1.0), 5),
    },
    # With AdamW inside.
    "recommended line": {
        "optclip": lambda: skip.optimizers(1.0)["optclip, recommended line"],
        "optax": lambda: skip.optimizers(1.0)["optax, apply_if_finite"],
    },
}
CASES = [
    *(
        Case(tree, "none" if clip == "recommended line" else "adamw", clip)
        for tree in ("gpt2", "llama")
        for clip in CLIPS
    ),
    *(Case(str(leaves), "none", "global norm") for leaves in (100, 500, 1000, 2000)),
]
TINY = [Case("8", "none", "global norm")]
# A compilation of more than `LONG` seconds is not repeated: its relative noise is
# small.
ROUNDS, LONG = 3, 30.0


def rows(tiny: bool) -> Iterator[Row]:
    for case in TINY if tiny else CASES:
        seconds = _seconds_of(case, 1 if tiny else ROUNDS)
        for name, samples in seconds.items():
            row = {"contender": name, "seconds": statistics.median(samples)}
            if "optax" in seconds:
                pairs = zip(samples, seconds["optax"], strict=True)
                row["over optax"] = statistics.median(a / b for a, b in pairs)
            yield {**case._asdict(), **row}


def _seconds_of(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each contender in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in CLIPS[case.clip]}
    for _ in range(rounds):
        for name, samples in seconds.items():
            samples.append(_seconds_in_subprocess(case, name))
        if max(samples[-1] for samples in seconds.values()) > LONG:
            break
    return seconds


def _seconds_in_subprocess(case: Case, name: str) -> float:
    command = [sys.executable, "-m", "benchmarks.compile", *case, name]
    return float(subprocess.check_output(command, stderr=subprocess.DEVNULL))


def lines(tx: Any, tree: str, options: dict[str, Any] | None = None) -> int:
    """Return the number of lines of the optimized program of an update."""
    shapes = jax.tree.leaves(trees.typed(_shapes(tree), "float32"))
    lowered = jax.jit(tx.update).lower(shapes, jax.eval_shape(tx.init, shapes), shapes)
    text = lowered.compile(compiler_options=options).as_text()
    return len((text or "").splitlines())


def seconds_to_compile(case: Case, name: str) -> float:
    """Return the CPU seconds to compile an update in this process, a new one."""
    jax.config.update("jax_enable_compilation_cache", False)
    tree = jax.tree.leaves(trees.typed(_shapes(case.tree), "float32"))
    tx = CLIPS[case.clip][name]()
    tx = optax.chain(tx, optax.adamw(1e-3)) if case.optimizer == "adamw" else tx
    state = jax.eval_shape(tx.init, tree)
    # Excludes what JAX initializes at the first compilation.
    jax.jit(lambda x: x + 1).lower(tree[0]).compile()
    start = time.process_time()
    jax.jit(tx.update).lower(tree, state, tree).compile()
    return time.process_time() - start


def _shapes(tree: str) -> Any:
    if tree.isdigit():
        return trees.small_leaves(int(tree))
    layers = {
        "72 layers": [(512, 512), (512,)] * 72,
        "narrow llama": trees.workloads(tiny=False)["llama"],
    }
    whole = {"llama": trees.llama(4096, 32, 11_008, 32_000)}
    return (trees.workloads(tiny=False) | whole | layers)[tree]


if __name__ == "__main__":
    *case, name = sys.argv[1:]
    print(seconds_to_compile(Case(*case), name))
