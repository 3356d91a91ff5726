"""Benchmark `clip`: global-norm clipping alone, outside a training step."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import exact, other_frameworks, trees
from benchmarks.donated_buffers import DonatedTree, compiled_together
from benchmarks.timing import Row, race

CASES = [
    *((tree, dtype) for tree in ("gpt2", "llama") for dtype in trees.DTYPES),
    ("small", "float32"),
    ("small", "bfloat16"),
]


def rows(tiny: bool) -> Iterator[Row]:
    shapes = trees.workloads(tiny)
    for tree, dtype in CASES[-1:] if tiny else CASES:
        source = trees.numbers(shapes[tree], dtype)
        for row in raced(source, 2 if tiny else 15):
            yield {"tree": tree, "dtype": dtype, **row}


def raced(source: Any, rounds: int) -> list[Row]:
    """Race all contenders on a tree of NumPy arrays."""
    arrays = jax.tree.leaves(source)
    limit, error = checked(arrays)
    donated = DonatedTree(source)
    contenders = compiled_together(lambda tx: donated.clip(tx, error), clips(limit))
    # The overhead of passing this number of leaves through a compiled function.
    contenders["identity"] = donated.clip(optax.identity(), lambda tree: 0.0)
    contenders |= other_frameworks.clips(arrays, limit, error)
    return race(contenders, rounds, against="optclip")


def checked(arrays: exact.Arrays) -> tuple[float, Callable[[Any], float]]:
    """Return a threshold that clips, and a function that checks the result."""
    limit = exact.FRACTION * trees.exact_norm(arrays)
    factors = exact.by(limit, exact.global_norm)(arrays, arrays)
    return limit, exact.clip_error(arrays, factors)


def clips(limit: float) -> dict[str, Any]:
    return {
        "optclip": optclip.clip_by_global_norm(limit),
        "optclip, no record": optclip.clip_by_global_norm(limit, record=False),
        "optax": optax.clip_by_global_norm(limit),
        "formula": optax.stateless(lambda tree, _: formula(tree, limit)),
    }


def formula(tree: Any, limit: float) -> Any:
    """Clip by the textbook formula in float32, without guards for overflow or NaN."""
    wide = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in wide))
    scale = jnp.minimum(1.0, limit / norm)
    return jax.tree.map(lambda x: (x.astype(jnp.float32) * scale).astype(x.dtype), tree)
