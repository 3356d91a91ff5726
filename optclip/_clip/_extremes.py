"""Find the largest numbers of an array, and count some, without a copy of it.

XLA on CPU reduces several functions of an array number by number, or writes them out
first. It adds up to 8 rows in one fast loop, so the array is read in blocks of 8 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The rows of a block and their greatest length: blocks that the cache of a CPU holds.
_ROWS, _LONGEST = 8, 8192

# The threads of a GPU reduce a large array in rows of one of these lengths.
_SHORTEST_ROW, _LONGEST_ROW = 256, 4096

# Returns functions of numbers, each of their shape: some whose largest value is wanted,
# and last the flags to count, as numbers.
Columns = Callable[[jax.Array], tuple[jax.Array, ...]]


def of_rows(columns: Columns, x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the largest of each of the columns in each row, and the sums of the last.

    The largest is NaN if a number is. There is no derivative. If there is one row,
    `columns` receives a vector.
    """
    x = lax.stop_gradient(x)
    if len(x) > 1:
        # Without the barrier XLA would read each row in a kernel of its own.
        return _reduced(columns(lax.optimization_barrier(x)), 1)
    found = lax.platform_dependent(
        x[0],
        cpu=functools.partial(_in_blocks, columns),
        default=functools.partial(_in_rows, columns),
    )
    return tuple(y[None] for y in found)


def _in_blocks(columns: Columns, x: jax.Array) -> tuple[jax.Array, ...]:
    # XLA would widen all of a narrow array before a loop, so its rows are as long as
    # they can be, an eighth of the array.
    is_narrow = jnp.finfo(x.dtype).bits < 32
    steps = 1 if is_narrow else -(-x.size // (_ROWS * _LONGEST))
    width = x.size // (_ROWS * steps)
    whole = _ROWS * width * steps

    def reduced(i: Any) -> tuple[jax.Array, ...]:
        block = lax.dynamic_slice_in_dim(x, i * _ROWS * width, _ROWS * width)
        return _reduced(columns(block.reshape(_ROWS, width)))

    # The first block starts the loop, so that it has the mesh type of the array.
    found = reduced(0)
    if steps > 1:
        found = lax.fori_loop(1, steps, lambda i, f: _merged(f, reduced(i)), found)
    if whole < x.size:
        pairs = zip(found, columns(x[whole:]), strict=True)
        found = [jnp.concatenate(pair) for pair in pairs]
    while found[0].size > _LONGEST:
        found = _folded(found)
    return _reduced(found)


def _folded(columns: Any) -> list[jax.Array]:
    """Return shorter columns with the same largest numbers and the same sum."""
    whole = columns[0].size // _ROWS * _ROWS
    found = _reduced([x[:whole].reshape(_ROWS, -1) for x in columns])
    pairs = zip(found, columns, strict=True)
    return [jnp.concatenate([x, rest[whole:]]) for x, rest in pairs]


def _in_rows(columns: Columns, x: jax.Array) -> tuple[jax.Array, ...]:
    lengths = range(_LONGEST_ROW, _SHORTEST_ROW - 1, -1)
    length = next((n for n in lengths if x.size % n == 0), None)
    if length is None:
        return _reduced(columns(x))
    return _reduced(_reduced(columns(x.reshape(-1, length)), 1))


def _reduced(columns: Any, axis: int = 0) -> tuple[jax.Array, ...]:
    *signed, count = columns
    start = [np.array(-np.inf, x.dtype) for x in signed] + [np.array(0, count.dtype)]
    return tuple(lax.reduce(tuple(columns), tuple(start), _merged, [axis]))


def _merged(one: Any, other: Any) -> tuple[jax.Array, ...]:
    pairs = zip(one[:-1], other[:-1], strict=True)
    return *(_larger(*pair) for pair in pairs), one[-1] + other[-1]


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the larger number, or NaN if one is."""
    return lax.select((a >= b) | (a != a), a, b)
