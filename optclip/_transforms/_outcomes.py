"""Summarize the outcomes of a step for many norms as one number per quantity."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    _axis_names,
    _collectives,
    _leaves,
    _maxima,
    _placement,
    _xla,
)
from .._clip import BlockOutcome
from .._typing import ClipRecord

# A large block is reduced in rows of one of these lengths.
_SHORTEST, _LONGEST = 256, 4096

# Values that differ less than this count as equal. XLA may compute one again for each
# consumer, with other roundings, and none of them must miss the largest.
_NEAR = 1e-6

Values = list[jax.Array]


def of_most_exceeded(outcomes: list[BlockOutcome]) -> ClipRecord:
    """Return the record of the norm that exceeds its threshold most.

    Counts and flags cover all norms.
    """
    # A reduction of several arrays at once has no derivative, and the record needs none.
    outcomes = lax.stop_gradient(outcomes)
    dtype = max((outcome.norm.dtype for outcome in outcomes), key=lambda d: d.itemsize)
    here = [_as_vectors(outcome) for outcome in outcomes if _is_here(outcome)]
    split = [_across_devices(outcome) for outcome in outcomes if not _is_here(outcome)]
    entries = [[x.astype(dtype) for x in values] for values in split]
    here = _placement.together(here)
    if here:
        # All leaves are reduced together, so that a GPU launches no kernel for each.
        columns = zip(*here, strict=True)
        joined = [
            jnp.concatenate([x.astype(dtype) for x in column]) for column in columns
        ]
        entries.append(_over_axes(joined))
    entries = _placement.together(entries)
    norm, threshold, coefficient, nonfinite, clipped = entries[0]
    if len(entries) > 1:
        stacks = map(jnp.stack, zip(*entries, strict=True))
        norm, threshold, coefficient, nonfinite, clipped = _over_axes(list(stacks))
    count = clipped.astype(jnp.float32)
    axes = [_axis_names.split_axes(x.clipped, x.declared.axis_name) for x in outcomes]
    sizes = map(_axis_names.axes_size, axes)
    number = sum(x.total() * n for x, n in zip(outcomes, sizes, strict=True))
    return ClipRecord(
        clip_norm=norm,
        clip_threshold=threshold,
        clip_coefficient=coefficient,
        clip_fraction=count / _leaves.count_as(number, jnp.float32),
        clip_clipped=clipped > 0,
        clip_nonfinite=nonfinite > 0,
    )


def _values(outcome: BlockOutcome) -> Values:
    """Return the values of `_over_axes`, which broadcast to the norms."""
    columns = (*outcome[:3], outcome.nonfinite, outcome.clipped)
    return [x.astype(outcome.norm.dtype) for x in columns]


def _as_vectors(outcome: BlockOutcome) -> Values:
    """Return the values of a block as vectors, those of a large block reduced in rows.

    On a GPU a block of threads reduces each row.
    """
    values, shape = _values(outcome), outcome.norm.shape
    size = _leaves.size_of(outcome.norm)
    if size <= _xla.FEW:
        return [jnp.broadcast_to(x, shape).ravel() for x in values]
    if not math.isfinite(size):
        return [x.reshape(1) for x in _over_axes(values)]
    lengths = range(_LONGEST, _SHORTEST - 1, -1)
    length = next((n for n in lengths if size % n == 0), shape[-1])
    rows = [jnp.broadcast_to(x, shape).reshape(-1, length) for x in values]
    rank = _rank(rows[0], rows[1] if values[1].ndim else values[1])
    return list(_along_last(rank, *rows)[1:])


def _across_devices(outcome: BlockOutcome) -> Values:
    """Return the values of `_over_axes` over all devices that share the block."""
    columns = (*outcome[:3], outcome.nonfinite, outcome.clipped)
    declared = outcome.declared.axis_name
    axes = [_axis_names.split_axes(x, declared) for x in columns]
    values = _over_axes(_values(outcome))
    if split := tuple(dict.fromkeys(itertools.chain(*axes[:3]))):
        is_common = not outcome.threshold.ndim and not axes[1]
        values[:3] = _most_exceeded(values[:3], split, is_common=is_common)
    for i in (3, 4):
        values[i] = _collectives.reduced_over(lax.psum, values[i], axes[i])
    return values


def _over_axes(values: Values) -> Values:
    """Return the norm that exceeds its threshold most, with these, and sums of flags.

    Args:
      values: The norms, thresholds, coefficients, and flags of non-finite and of
        clipped norms as numbers. All broadcast to the norms.
    """
    while values[0].ndim and _are_alone(values):
        # All are reduced together, since XLA on CPU would materialize the operand of
        # each reduction.
        rank = _rank(*values[:2])
        rows = [jnp.broadcast_to(x, values[0].shape) for x in (rank, *values)]
        if _leaves.size_of(rank) <= _xla.FEW:
            rows = [x.ravel() for x in rows]
        _, *values = _along_last(*rows)
    if values[0].ndim:
        is_common = not values[1].ndim
        # Flags that broadcast would be counted once per row.
        flags = (jnp.broadcast_to(x, values[0].shape) for x in values[3:])
        values[3:] = map(jnp.sum, flags)
        values[:3] = _most_exceeded(values[:3], is_common=is_common)
    return values


def _most_exceeded(
    exceeded: Values, axes: _axis_names.Axes = (), *, is_common: bool
) -> Values:
    """Return the norm with the largest ratio to its threshold, with both, by maxima.

    Args:
      exceeded: The norms, thresholds and coefficients.
      axes: The mapped axes that split the norms.
      is_common: Whether all norms have one threshold.
    """
    norm, threshold, coefficient = exceeded

    def largest(x: jax.Array) -> jax.Array:
        peak = _maxima.largest(x) if x.ndim else x
        return _collectives.reduced_over(_maxima.over_devices, peak, axes)

    if is_common:
        # The largest norm has the smallest coefficient, so that both maxima take one
        # round of collectives.
        return [largest(norm), threshold, -largest(-coefficient)]

    def chosen(x: jax.Array) -> jax.Array:
        return jnp.where(is_chosen, x, jnp.full_like(x, -jnp.inf))

    rank = _ratio(norm, threshold)
    peak = _collectives.reduced_over(lax.pmax, jnp.max(rank), axes)
    is_chosen = rank >= peak * (1 - _NEAR)
    norm = chosen(norm)
    peak = largest(norm)
    # If the peak is NaN, only NaN is chosen.
    is_chosen = (norm >= peak * (1 - _NEAR)) | (norm != norm)
    return [peak, -largest(chosen(-threshold)), -largest(chosen(-coefficient))]


def _rank(norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return numbers in the order of the ratios of norms to thresholds."""
    return _ratio(norm, threshold) if threshold.ndim else _size(norm)


def _ratio(norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return norms over thresholds to ten bits; inf for a threshold of 0, or a NaN.

    Rounding makes ratios equal that differ by the roundings of a norm or a rule, so
    that the largest of these norms is recorded on each mesh.
    """
    # Smaller divisors would be flushed to 0, and 0 / 0 is not a ratio.
    tiny = np.array(jnp.finfo(norm.dtype).tiny, norm.dtype)
    ratio = norm / lax.max(threshold, jnp.broadcast_to(tiny, threshold.shape))
    return lax.reduce_precision(_size(ratio), jnp.finfo(norm.dtype).nexp, 10)


def _size(norm: jax.Array) -> jax.Array:
    """Return norms, and inf for NaN, so that all can be compared."""
    return lax.select(norm == norm, norm, jnp.full_like(norm, jnp.inf))


def _are_alone(values: Values) -> bool:
    """Return whether these have one mesh type, and are not sharded by XLA."""
    kinds = {_axis_names.split_axes(x) for x in values}
    last = values[0].shape[-1]
    # float32 counts exactly only below 2**24, and the bound of a symbolic size is not
    # known.
    is_counted = isinstance(last, int) and last < 2**24
    return len(kinds) == 1 and is_counted and not _xla.may_be_split(values[0])


def _along_last(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Return the values of the largest rank, the first of them, and the sums of flags.

    Both are along the last axis, in one kernel for all.
    """
    # Any rank is larger than that of no norm.
    start = tuple(np.array([-1] + [0] * 5, values[0].dtype))
    return lax.reduce(values, start, _merged, [values[0].ndim - 1])


def _merged(
    one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    (rank, norm, *_), (other_rank, other_norm, *_) = one, other
    is_larger = (norm >= other_norm) | (norm != norm)
    is_first = (rank > other_rank) | ((rank == other_rank) & is_larger)
    pairs = zip(one[:4], other[:4], strict=True)
    chosen = (lax.select(is_first, a, b) for a, b in pairs)
    return *chosen, *map(lax.add, one[4:], other[4:])


def _is_here(outcome: BlockOutcome) -> bool:
    """Return whether all norms of a block are on this device."""
    norm, declared = outcome.norm, outcome.declared.axis_name
    axes = _axis_names.split_axes(norm, declared), _axis_names.split_axes(norm)
    return not any(axes) and not _xla.may_be_split(norm)
