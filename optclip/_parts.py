"""One array reduced part by part, where XLA on CPU would first widen all of it.

That is float16 and narrower; float32 and bfloat16 it widens as it adds.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The loop over float16 and narrower: so many rows of so many numbers are merged at a
# time, and so many times before that is merged with the total. Without it XLA takes
# seven times as long.
_LANES, _ROWS, _TIMES = 2048, 4, 32
AT_ONCE = _LANES * _ROWS

# Of slices of such an array so many numbers are widened at a time.
_WIDENED = 2**18

Axis = tuple[int, ...] | None
Reduce = Callable[[jax.Array, Axis], jax.Array]
Merge = Callable[[Any, Any], Any]
Power = Callable[[jax.Array, jax.Array | None], jax.Array]


class Term(NamedTuple):
    """One array, to be reduced over `axis` after `power(array, scale)`.

    Terms of one key may be reduced together; a term whose key is None is alone.
    """

    array: jax.Array
    key: Hashable
    axis: Axis
    power: Power
    scale: jax.Array | None = None

    def reduced(self, reduce: Reduce) -> jax.Array:
        return reduce(self.power(self.array, self.scale), self.axis)


def by_pairs(merge: Merge, values: list[Any]) -> Any:
    """All values merged in pairs: thirty-two lose at most five roundings."""
    return merged_to(1, merge, values)[0]


def merged_to(most: int, merge: Merge, values: list[Any]) -> list[Any]:
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values


def looped(merge: Merge, carry: Merge, reduce: Reduce, term: Term) -> jax.Array:
    """The term reduced a few rows at a time, so that nothing is kept.

    `carry` merges (value, lost) of runs of rows: plainly added, 2**26 equal numbers
    lose 24 units in the last place.
    """
    flat = term.array.ravel()
    step = AT_ONCE

    def power(x: jax.Array) -> jax.Array:
        return term.power(x, term.scale)

    def rows(start: jax.Array | int, times: int) -> jax.Array:
        def add(i, lanes):
            starts = [start + i * step + j * _LANES for j in range(_ROWS)]
            found = [power(lax.dynamic_slice(flat, (s,), (_LANES,))) for s in starts]
            return merge(lanes, by_pairs(merge, found))

        return lax.fori_loop(0, times, add, zeros)

    zeros = jnp.zeros_like(power(flat[:_LANES]))
    num_blocks, rest = divmod(flat.size, step * _TIMES)
    times, tail = divmod(rest, step)
    lanes, lost = lax.fori_loop(
        0,
        num_blocks,
        lambda i, total: carry(total, (rows(i * step * _TIMES, _TIMES), zeros)),
        (zeros, zeros),
    )
    lost = merge(lost, rows(num_blocks * step * _TIMES, times))
    rest = reduce(power(flat[flat.size - tail :]), None)
    return merge(reduce(merge(lanes, lost), None), rest)


def sliced(merge: Merge, reduce: Reduce, term: Term) -> jax.Array:
    """The slices of a term reduced part by part, so that little is widened at once."""
    runs = _runs(term.array.shape, term.axis or ())
    x = term.array.reshape([n for n, _ in runs])
    axis = tuple(d for d, (_, is_reduced) in enumerate(runs) if is_reduced)
    kept = [1 if is_reduced else n for n, is_reduced in runs]
    lead = x.shape.index(max(x.shape))
    length = x.shape[lead]
    step = max(1, min(length, _WIDENED * length // x.size))
    count, rest = divmod(length, step)

    def part(start: jax.Array | int, size: int) -> jax.Array:
        cut = lax.dynamic_slice_in_dim(x, start, size, lead)
        # The barrier saves up to a third of the time on jax 0.12, and none on 0.10.
        return reduce(lax.optimization_barrier(term.power(cut, term.scale)), axis)

    def add(i: jax.Array, found: jax.Array) -> jax.Array:
        return merge(found, part(i * step, step))

    def place(i: jax.Array, found: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            found, part(i * step, step), i * step, lead
        )

    # Of its type, which says over which devices it varies.
    none = jnp.zeros_like(part(0, step))
    if lead in axis:
        found = lax.fori_loop(0, count, add, none)
        found = merge(found, part(count * step, rest)) if rest else found
    else:
        one = lax.slice_in_dim(none, 0, 1, axis=lead)
        room = jnp.broadcast_to(one, [*kept[:lead], count * step, *kept[lead + 1 :]])
        found = lax.fori_loop(0, count, place, room)
        last = [part(count * step, rest)] if rest else []
        found = lax.concatenate([found, *last], lead)
    return found.reshape(
        [1 if d in (term.axis or ()) else n for d, n in enumerate(term.array.shape)]
    )


def _runs(shape: tuple[int, ...], axis: tuple[int, ...]) -> list[tuple[int, bool]]:
    """Neighbouring dimensions as one, with whether they are reduced."""
    runs: list[tuple[int, bool]] = []
    for d, n in enumerate(shape):
        is_reduced = d in axis
        if runs and runs[-1][1] == is_reduced:
            runs[-1] = runs[-1][0] * n, is_reduced
        else:
            runs.append((n, is_reduced))
    return runs
