"""Benchmark `clip`: clipping alone, outside a training step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import trees
from benchmarks.donated_buffers import DonatedTree, compiled_together
from benchmarks.timing import Row, race

# Threshold over norm. Not a power of two, since scaling by one is always exact.
FRACTION = 0.4
CASES = [
    *((tree, dtype) for tree in ("gpt2", "llama") for dtype in trees.DTYPES),
    ("small", "float32"),
    ("small", "bfloat16"),
]


def rows(tiny: bool) -> Iterator[Row]:
    shapes, rounds = trees.workloads(tiny), 2 if tiny else 15
    for tree, dtype in CASES[-1:] if tiny else CASES:
        source = trees.numbers(shapes[tree], dtype)
        for row in raced(source, rounds):
            yield {"tree": tree, "dtype": dtype, **row}
    source = trees.numbers(shapes["gpt2"], "float32")
    donated = DonatedTree(source)
    contenders = {name: donated.clip(tx) for name, tx in by_value(source).items()}
    for row in race(contenders, rounds, against="optax, value"):
        yield {"tree": "gpt2", "dtype": "float32", **row}


def raced(source: Any, rounds: int) -> list[Row]:
    """Race global-norm clipping of a tree of NumPy arrays."""
    limit, error = checked(jax.tree.leaves(source))
    donated = DonatedTree(source)
    clips = by_global_norm(limit) | {"formula": formula(limit)}
    contenders = compiled_together(lambda tx: donated.clip(tx, error), clips)
    # The overhead of passing this number of leaves through a compiled function.
    contenders["identity"] = donated.clip(optax.identity())
    return race(contenders, rounds, against="optclip")


def checked(arrays: Sequence[np.ndarray]) -> tuple[float, Callable[[Any], float]]:
    """Return a threshold that clips, and the error of a clipped norm beyond rounding."""
    limit = FRACTION * trees.exact_norm(arrays)
    rounding = max(float(jnp.finfo(x.dtype).eps) for x in arrays) / 2

    def error(tree: Any) -> float:
        relative = abs(trees.exact_norm(jax.tree.leaves(tree)) / limit - 1)
        # np.maximum propagates NaN; Python's max may drop it.
        return float(np.maximum(relative - rounding, 0.0))

    return limit, error


def by_global_norm(limit: float) -> dict[str, Any]:
    return {
        "optclip": optclip.clip_by_global_norm(limit),
        "optclip, no record": optclip.clip_by_global_norm(limit, record=False),
        "optax": optax.clip_by_global_norm(limit),
    }


def by_value(source: Any) -> dict[str, Any]:
    bounds = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), source)
    return {
        "optclip, value": optclip.clip_by_value(0.5),
        "optclip, value, no record": optclip.clip_by_value(0.5, record=False),
        "optclip, value, arrays": optclip.clip_by_value(bounds),
        "optclip, value, arrays, no record": optclip.clip_by_value(
            bounds, record=False
        ),
        "optax, value": optax.clip(0.5),
    }


def formula(limit: float) -> optax.GradientTransformation:
    """Clip by the textbook formula in float32, without guards for overflow or NaN."""

    def clipped(tree: Any, _: Any) -> Any:
        wide = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
        scale = limit / jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in wide))
        scale = jnp.minimum(1.0, scale)
        return jax.tree.map(
            lambda x: (x.astype(jnp.float32) * scale).astype(x.dtype), tree
        )

    return optax.stateless(clipped)
