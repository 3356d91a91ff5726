"""Summarize the elements of a leaf by the largest, whose bounds they exceed most.

If a leaf has one bound, or two, its largest and smallest elements have the largest
ratios to their bounds. The record needs only these and the number of clipped elements,
and no norm, ratio and coefficient of each element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._arrays import _axis_names, _leaves, _placement, _xla
from .._arrays._leaf import Leaf
from .._norms import LEAST, flush_small
from ._bounded import ElementResponse, Limits, bounded
from ._clip import as_limit

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
        return _reduced(columns(x), 1)
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
    # NaN is kept, as the larger number.
    larger = (lax.select((a >= b) | (a != a), a, b) for a, b in pairs)
    return *larger, one[-1] + other[-1]


# Smaller leaves of one type are reduced together, up to this many.
_SMALL, _TOGETHER = 4096, 32


class How(NamedTuple):
    """Hold the static part of moving elements, in the way of `bounded`."""

    response: ElementResponse
    strict: bool
    cleaned: bool
    like: jnp.dtype
    dtype: jnp.dtype


def is_sampled(response: object, leaf: Leaf, limit: Limits) -> bool:
    """Return whether the largest elements of a leaf have its largest ratios."""
    x = leaf.array
    is_plain = _leaves.is_floating(x) and not jnp.iscomplexobj(x)
    # Clipped elements are counted in int32.
    if not is_plain or not 1 < _leaves.size_of(jnp.asarray(x)) < 2**31:
        return False
    are_numbers = jnp.ndim(limit.lower) == jnp.ndim(limit.upper) == 0
    return are_numbers and not _xla.may_be_split(x) and _is_hashable(response)


def _is_hashable(value: object) -> bool:
    """Return whether a value can be a static argument: it contains no array."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def grouped(
    leaves: dict[int, Leaf], limits: Sequence[Limits], *, itemized: bool
) -> list[tuple[int, ...]]:
    """Return the blocks of each group of small leaves of one type on one device.

    Args:
      leaves: The leaf of each block.
      limits: The limits of all blocks.
      itemized: Whether each leaf is alone, as leaves on several devices always are.
    """
    if _placement.are_apart([leaf.array for leaf in leaves.values()]):
        itemized = True
    groups: dict[Hashable, list[int]] = {}
    for block, leaf in leaves.items():
        x = jnp.asarray(leaf.array)
        kind = jax.typeof(x), leaf.like.dtype, limits[block].is_symmetric
        axes = _axis_names.split_axes(x, leaf.axis_name)
        is_alone = itemized or axes or x.size >= _SMALL
        groups.setdefault(block if is_alone else kind, []).append(block)
    return [
        tuple(group[start : start + _TOGETHER])
        for group in groups.values()
        for start in range(0, len(group), _TOGETHER)
    ]


def after(count: jax.Array, *bounds: Any) -> Sequence[Any]:
    """Return bounds that XLA on CPU reads only after a count.

    It then moves the elements of a donated leaf in place, and no longer copies the leaf
    so that both can read it. On other platforms no bound waits, nor in `shard_map`,
    where both would have different types.
    """
    if not isinstance(count, Tracer) or _axis_names.varying(jax.typeof(count)):
        return bounds

    def waiting(count: jax.Array, *bounds: jax.Array) -> Sequence[jax.Array]:
        # XLA cannot infer that no count is negative.
        never = jnp.min(count) < 0
        return tuple(jnp.where(never, jnp.zeros_like(x), x) for x in bounds)

    return lax.platform_dependent(
        count, *bounds, cpu=waiting, default=lambda count, *bounds: bounds
    )


def sample(
    how: How, leaves: Sequence[Leaf], limits: Sequence[Limits]
) -> tuple[jax.Array, ...]:
    """Return the largest elements of leaves of one type, whose limits are of one kind.

    Args:
      how: The static part.
      leaves: One leaf, or several small ones.
      limits: The limits of each leaf.

    Returns:
      The moduli of the elements, a vector; their bounds, or the one bound of all; how
      much each shrank; and numbers whose sum is the number of clipped elements.
    """
    arrays = [jnp.asarray(leaf.array) for leaf in leaves]
    wide = _leaves.real_dtype(arrays[0].dtype)
    bounds = [
        [
            as_limit(_placement.beside(bound, x), wide, towards_zero=how.strict)
            for bound, x in zip(side, arrays, strict=True)
        ]
        for side in ([x.lower for x in limits], [x.upper for x in limits])
    ]
    return _compiled(how, limits[0].is_symmetric, arrays, *bounds)


# Compiled, so that leaves of one type are traced once, and an eager call is one.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    how: How,
    is_symmetric: bool,
    arrays: list[jax.Array],
    lower: list[jax.Array],
    upper: list[jax.Array],
) -> tuple[jax.Array, ...]:
    def columns(x: jax.Array) -> tuple[jax.Array, ...]:
        wide = _leaves.widen(x)
        rows = (bound[0] if x.ndim == 1 else bound[:, None] for bound in bounds)
        goal = how.response.element(wide, *(jnp.broadcast_to(r, x.shape) for r in rows))
        sides = (jnp.abs(wide),) if is_symmetric else (wide, -wide)
        return *sides, _is_clipped(wide, goal).astype(jnp.int32)

    bounds = (jnp.stack(lower), jnp.stack(upper))
    x = jnp.stack([each.ravel() for each in arrays])
    *peaks, count = of_rows(columns, x)
    elements = peaks[0] if is_symmetric else jnp.concatenate([peaks[0], -peaks[1]])
    lowest, highest = (jnp.tile(bound, len(peaks)) for bound in bounds)
    _, shrunk = bounded(
        "", elements, lowest, highest, how.response, jnp.zeros((), how.like),
        strict=how.strict, cleaned=how.cleaned,
    )  # fmt: skip
    norm = flush_small(jnp.abs(elements))
    # No factor makes a NaN finite, so it has none.
    shrunk = jnp.where(jnp.isnan(norm), norm, shrunk)
    # One number, so that devices compare norms without their ratios.
    threshold = highest[0] if len(arrays) == 1 else highest
    if not is_symmetric:
        threshold = jnp.where(elements < 0, jnp.abs(lowest), jnp.abs(highest))
    counts = jnp.pad(count, (0, norm.size - count.size))
    return tuple(y.astype(how.dtype) for y in (norm, threshold, shrunk, counts))


def _is_clipped(wide: jax.Array, goal: jax.Array) -> jax.Array:
    """Return whether elements count as clipped, as those of a finite norm do."""
    size = jnp.abs(wide)
    is_finite = (size >= LEAST[size.dtype.name]) & (size < jnp.inf)
    return is_finite & (goal != wide) & (goal == goal)
