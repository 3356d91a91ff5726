"""Part `compile`: seconds to trace, lower and compile, without any cache.

Each compilation has a process of its own, and the contenders alternate:

    python -m benchmarks.compiling optclip clip equal 2000 f32
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import contenders, scopes, trees
from benchmarks.cases import Case, Options, Row

LIMIT_SECONDS = 1800


class Tree(NamedTuple):
    """A tree to compile for, by its kind and number of leaves."""

    kind: str
    leaves: int
    dtype: str
    optax: bool = True  # whether optax is compiled too without --long


TREES = (
    Tree("equal", 500, "f32"),
    Tree("equal", 1000, "f32"),
    Tree("equal", 2000, "f32"),
    Tree("equal", 4000, "f32", False),
    Tree("equal", 2000, "mixed"),
    Tree("assorted", 500, "f32"),
    Tree("assorted", 1000, "f32"),
    Tree("assorted", 2000, "f32"),
    Tree("assorted", 4000, "f32", False),
    Tree("distinct", 1000, "f32"),
    Tree("gpt2", 148, "f32"),
    Tree("gpt2", 148, "bf16"),
    Tree("gpt2", 148, "f16"),
)
SMALL = (
    Tree("equal", 10, "f32"),
    Tree("equal", 80, "f32", False),
)
# What is left without all care: our norm unguarded, and a plain scale by a constant.
LEAST = {"norm": ["one pass"], "clip": ["one pass", "scale only"], "rms": []}
CLIPS = {
    "clip": contenders.clips(1.0),
    "rms": {
        "optclip": scopes.ours("rms", 1.0, None),
        "optax": scopes.by_optax("rms", 1.0, None),
    },
}
MAKERS = {
    "equal": trees.equal,
    "assorted": trees.assorted,
    "distinct": trees.distinct,
    "gpt2": lambda _: trees.gpt2(768, 12, 50257, 1024),
}


def cases(options: Options) -> Iterator[Case]:
    """A case for each tree: the global norm, the clip by it, and by that of a leaf."""
    for tree in SMALL if options.small else TREES:
        for what in ("norm", "clip", "rms"):
            names = ["optclip", *LEAST[what]]
            if tree.optax or options.long:
                names.append("optax")
            labels = {
                "what": what, "tree": tree.kind, "leaves": str(tree.leaves),
                "dtype": tree.dtype,
            }  # fmt: skip
            yield Case(labels, _case(tree, what, names, options))


def _case(
    tree: Tree, what: str, names: list[str], options: Options
) -> Callable[[], dict[str, Row]]:
    """How to compile for all contenders, in random order: thrice, slow ones once."""

    def run() -> dict[str, Row]:
        rows: dict[str, Row] = {name: {"seconds": []} for name in names}
        rng = np.random.default_rng(0)
        for _ in range(1 if options.small else 3):
            for i in rng.permutation(len(names)):
                row = rows[names[i]]
                if sum(row["seconds"]) < 60:
                    _measure(row, names[i], what, tree)
        return rows

    return run


def _measure(row: Row, name: str, what: str, tree: Tree) -> None:
    """One compilation in a process of its own, added to the row."""
    command = [sys.executable, "-m", "benchmarks.compiling"]
    command += [name, what, tree.kind, str(tree.leaves), tree.dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS
    )
    row["seconds"].append(json.loads(done.stdout.splitlines()[-1]))


def measured(name: str, what: str, kind: str, leaves: str, dtype: str) -> float:
    """Seconds in this process."""
    jax.config.update("jax_enable_compilation_cache", False)
    tree = trees.typed(MAKERS[kind](int(leaves)), dtype)
    is_norm = what == "norm" or name == "one pass"
    table = contenders.NORMS if is_norm else CLIPS[what]
    donate = () if is_norm else (0,)
    # A first small compilation starts the compiler's threads.
    jax.jit(lambda x: x + 1)(jax.numpy.ones(3)).block_until_ready()
    start = time.perf_counter()
    jax.jit(table[name], donate_argnums=donate).lower(tree).compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
