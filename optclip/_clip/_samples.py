"""Summarize the elements of a leaf by the largest, whose bounds they exceed most.

If a leaf has one bound, or two, its largest and smallest elements have the largest
ratios to their bounds. The record needs only these and the number of clipped elements,
and no norm, ratio and coefficient of each element.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .._arrays import _axis_names, _leaves, _placement, _xla
from .._arrays._leaf import Leaf
from .._norms import LEAST, flush_small
from . import _extremes
from ._bounded import ElementResponse, Limits, bounded
from ._clip import as_limit

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
        return *_signed(is_symmetric, wide), _is_clipped(wide, goal).astype(jnp.int32)

    bounds = (jnp.stack(lower), jnp.stack(upper))
    x = jnp.stack([each.ravel() for each in arrays])
    *peaks, count = _extremes.of_rows(columns, x)
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


def _signed(is_symmetric: bool, wide: jax.Array) -> tuple[jax.Array, ...]:
    return (jnp.abs(wide),) if is_symmetric else (wide, -wide)


def _is_clipped(wide: jax.Array, goal: jax.Array) -> jax.Array:
    """Return whether elements count as clipped, as those of a finite norm do."""
    size = jnp.abs(wide)
    is_finite = (size >= LEAST[size.dtype.name]) & (size < jnp.inf)
    return is_finite & (goal != wide) & (goal == goal)
