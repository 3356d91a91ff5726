"""Many small arrays of one type, each reduced to a number of its own, all at once.

On CPU they are the rows of one array. 2,000 norms of 64 elements and their clips take
a quarter of the time then, and less than half of it to compile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from optclip import _leaves, _sums
from optclip._sums import Reduce, Term

# From so many on: of four, a quarter of both times; of two, nothing.
MANY = 4

# So many at a time: 2,000 rows of one array take XLA 4 s, in lots of 64 they take 1 s.
_LOT = 64

# Rows are a copy: of 16-bit arrays larger than this it costs what it gains.
_NARROW = 1024


def is_row(x: jax.Array) -> bool:
    """Whether an array like this may be a row, many of them given."""
    is_small = _leaves.size_of(x) <= _NARROW
    return _sums.is_carried(x) and (x.dtype.itemsize >= 4 or is_small)


def reduced(reduce: Reduce, reduce_on_cpu: Reduce, terms: list[Term]) -> jax.Array:
    """What each of some terms of one type, over all axes, comes to: one vector."""
    like, axis, power, scale = terms[0].array, *terms[0][2:]
    if scale is not None:
        # XLA is not to know it: see `_totals._Power`.
        scale = lax.optimization_barrier(scale)
        terms = [term._replace(scale=scale) for term in terms]

    def apart() -> jax.Array:
        return jnp.stack([term.reduced(reduce) for term in terms])

    def lot(start: int) -> jax.Array:
        rows = [t.array.reshape(1, like.size) for t in terms[start : start + _LOT]]
        return reduce_on_cpu(power(lax.concatenate(rows, 0), scale), (1,))

    def joined() -> jax.Array:
        found = lax.concatenate([lot(i) for i in range(0, len(terms), _LOT)], 0)
        return found.reshape(len(terms), *([] if axis is None else [1] * like.ndim))

    return lax.platform_dependent(cpu=joined, default=apart)
