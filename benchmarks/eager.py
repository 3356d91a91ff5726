"""Benchmark `eager`: clipping a few small leaves by calls outside `jax.jit`."""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import clip, trees
from benchmarks.timing import Contender, Row, race


def rows(tiny: bool) -> Iterator[Row]:
    for leaves in (2, 8):
        tree = jax.device_put(trees.numbers(trees.small_leaves(leaves), "float32"))
        limit, error = clip.checked(tree)
        contenders = {
            name: Contender(eager(tx, tree), error=error)
            for name, tx in clip.by_global_norm(limit).items()
        }
        for row in race(contenders, 2 if tiny else 500, against="optax"):
            yield {"leaves": leaves, **row}


def eager(tx: Any, tree: Any) -> Any:
    state = tx.init(tree)
    return lambda: jax.block_until_ready(tx.update(tree, state)[0])
