"""Parts on 500 matrices, as in two reports of slow clipping in NVIDIA NeMo Automodel.

Issue 3685 has 225 million elements of mixed dtypes. Issue 3815 has 10.26 billion
elements in bfloat16; as many rows as fit are created on the device.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import clip, exact, other_frameworks, trees
from benchmarks.donated_buffers import DonatedTree, compiled_together
from benchmarks.gpu import racing
from benchmarks.timing import Row, race

COUNT = 500
MIXED = (600, 750)  # 225.0 M elements in all
LARGE = (4500, 4560)  # 10.26 G elements in all
# The source, JAX's tree, and the parameters and gradients in PyTorch.
COPIES = 4
# The fraction of JAX's memory to fill; temporaries of both libraries need the rest.
MEMORY_FRACTION = 0.8


def mixed(tiny: bool) -> Iterator[Row]:
    """Race on matrices of which every second one is in bfloat16."""
    count, shape = (6, (8, 12)) if tiny else (COUNT, MIXED)
    wide = trees.numbers([shape] * count, "float32")
    source = [x.astype(jnp.bfloat16) if i % 2 else x for i, x in enumerate(wide)]
    yield from _raced(tiny, source, *clip.checked(source))


def large(tiny: bool) -> Iterator[Row]:
    count, rows = (4, 8) if tiny else (COUNT, _rows_that_fit())
    shape = (rows, 12 if tiny else LARGE[1])
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    source = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    square = jax.jit(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))))
    norm = math.sqrt(sum(float(square(x)) for x in source))
    limit = exact.FRACTION * norm
    # All matrices have the same coefficient, so only the first is copied to the host.
    first = exact.clip_error([np.asarray(source[0])], [np.array([exact.FRACTION])])
    yield from _raced(tiny, source, limit, lambda tree: first(list(tree)[:1]))


def _rows_that_fit() -> int:
    """Return the number of rows per matrix: as in the report, or fewer."""
    memory = jax.devices()[0].memory_stats()
    if not memory:
        return 16
    free = MEMORY_FRACTION * memory["bytes_limit"] - memory["bytes_in_use"]
    fitting = free / (COPIES * COUNT * LARGE[1] * jnp.dtype(jnp.bfloat16).itemsize)
    return max(1, min(LARGE[0], int(fitting)))


def _raced(tiny: bool, source: list[Any], limit: float, error: Any) -> Iterator[Row]:
    donated = DonatedTree(source)
    clips = {
        "optclip": optclip.clip_by_global_norm(limit),
        "optax": optax.clip_by_global_norm(limit),
    }
    contenders = compiled_together(lambda tx: donated.clip(tx, error), clips)
    contenders |= other_frameworks.clips(source, limit, error)
    elements = sum(x.size for x in source)
    # The tolerance is wide, so that optax is timed: it sums 500 norms in bfloat16.
    for row in race(contenders, racing.rounds(tiny), against="optclip", close=1.0):
        yield {"matrices": len(source), "elements M": elements / 1e6, **row}
    yield from racing.without_torch()
