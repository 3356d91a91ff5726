"""Record one step in the numbers that the state stores.

The record contains only numbers that clipping computes anyway.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optclip._arrays import (
    _axis_names,
    _collectives,
    _leaves,
    _maxima,
    _numerics,
    _packed_state,
    _xla,
)
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree, TreeDef
from optclip.scopes._interface import Scope
from optclip.typing import ClipRecord

# The index of the last field of a record, which `of_step` does not compute.
_LEAF_NORM = ClipRecord._fields.index("clip_leaf_norm")

# Leaves with more norms than this are not concatenated, since that takes a copy.
_CONCATENATED = 2**16


class BlockOutcome(NamedTuple):
    """Hold the outcome of one step for one block, or for a row of blocks.

    Attributes:
      norm: The norm, or one norm per slice.
      threshold: Broadcasts to the norm, as do the fields below.
      coefficient: The factor applied to the block.
      nonfinite: Whether the norm is not finite.
      declared: The mapped axes that the norms are declared to be split over.
      clipped: Whether the block is clipped, as `_flagged` computes.
    """

    norm: jax.Array
    threshold: jax.Array
    coefficient: jax.Array
    nonfinite: jax.Array
    declared: _axis_names.Declared
    clipped: Any = None  # An array after `_flagged`.


def of_step(
    treedef: TreeDef,
    scope: Scope,
    outcomes: Batched,
    *,
    itemized: bool,
    learns: bool,
) -> ClipRecord:
    """Return the record of a single step, with a flag where the state has a count.

    Args:
      treedef: The structure of the norms.
      scope: The elements that share a norm.
      outcomes: A `BlockOutcome` for each norm.
      itemized: Whether the record has an entry for each norm.
      learns: Whether a learning rule sets the thresholds.
    """
    outcomes = outcomes if itemized else _concatenated(outcomes)
    flagged = outcomes.map(functools.partial(_flagged, learns))
    if itemized:
        entries = flagged.map(lambda outcome: _summary([outcome])).entries()
        fields = ([e[i] for e in entries] for i in range(_LEAF_NORM))
        new = ClipRecord(*(_packed_state.keyed(treedef, field) for field in fields))
    else:
        new = _summary(flagged.values)
    return new._replace(clip_fraction=None) if scope.itemized else new


def _flagged(learns: bool, outcome: BlockOutcome) -> BlockOutcome:
    """Return the outcome with a flag for a coefficient that changes its block."""
    norm, k = outcome.norm, outcome.coefficient
    if learns:
        # Some rules set a threshold of 0 for a leaf of zeros, which clips nothing.
        k = _numerics.select((norm == 0) & (k == k), jnp.ones_like(k), k)
    clipped = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
    return outcome._replace(coefficient=k, clipped=clipped)


def advanced(old: ClipRecord, new: ClipRecord) -> ClipRecord:
    """Return the record after a step."""

    def count(total: PyTree, once: PyTree) -> PyTree:
        return jax.tree.map(_numerics.counted, total, once)

    return ClipRecord(
        *(jax.tree.map(_as_float32, field) for field in new[:4]),
        clip_clipped=count(old.clip_clipped, new.clip_clipped),
        clip_nonfinite=count(old.clip_nonfinite, new.clip_nonfinite),
        clip_leaf_norm=jax.tree.map(_as_float32, new.clip_leaf_norm),
    )


def _as_float32(number: jax.Array) -> jax.Array:
    return number.astype(jnp.float32)


def _summary(outcomes: list[BlockOutcome]) -> ClipRecord:
    """Return one number per quantity, the same on all devices that share the blocks."""
    outcomes = [outcome for outcome in outcomes if _leaves.size_of(outcome.norm) > 0]
    if len(outcomes) == 1 and _is_common_number(outcomes[0]):
        norm, threshold, coefficient, nonfinite, _, clipped = outcomes[0]
        fraction = clipped.astype(jnp.float32)
        return ClipRecord(norm, threshold, coefficient, fraction, clipped, nonfinite)
    if not outcomes:
        zero = jnp.zeros((), jnp.float32)
        no = jnp.zeros((), jnp.bool_)
        return ClipRecord(zero, zero, zero + 1, zero, no, no)
    dtype = max((outcome.norm.dtype for outcome in outcomes), key=lambda d: d.itemsize)
    entries = [
        [x.astype(dtype) for x in _across_devices(outcome)] for outcome in outcomes
    ]
    norm, threshold, coefficient, nonfinite, clipped = zip(*entries, strict=True)

    def largest(values: tuple[jax.Array, ...]) -> jax.Array:
        return values[0] if len(values) == 1 else _maxima.largest(jnp.stack(values))

    count = functools.reduce(jnp.add, clipped).astype(jnp.float32)
    split = [_axis_names.split_axes(x.clipped, x.declared.axis_name) for x in outcomes]
    sizes = map(_axis_names.axes_size, split)
    number = sum(x.clipped.size * n for x, n in zip(outcomes, sizes, strict=True))
    return ClipRecord(
        clip_norm=largest(norm),
        clip_threshold=-largest(threshold),
        clip_coefficient=-largest(coefficient),
        clip_fraction=count / _leaves.count_as(number, jnp.float32),
        clip_clipped=count > 0,
        clip_nonfinite=functools.reduce(jnp.add, nonfinite) > 0,
    )


def _across_devices(outcome: BlockOutcome) -> list[jax.Array]:
    """Return the values of `_reduced` over all devices that share the blocks."""
    declared = outcome.declared.axis_name
    across = _maxima.over_devices
    how = [(x, across) for x in (outcome.norm, outcome.threshold, outcome.coefficient)]
    how += [(x, lax.psum) for x in (outcome.nonfinite, outcome.clipped)]
    reduced = []
    for value, (of, collective) in zip(_reduced(outcome), how, strict=True):
        axes = _axis_names.split_axes(of, declared)
        reduced.append(_collectives.reduced_over(collective, value, axes))
    return reduced


def _reduced(outcome: BlockOutcome) -> tuple[jax.Array, ...]:
    """Return the largest norm, -threshold and -coefficient, and the numbers of flags.

    The flags are `nonfinite` and `clipped`.
    """
    norm, threshold, coefficient, nonfinite, _, clipped = outcome
    flags = (x.astype(norm.dtype) for x in (nonfinite, clipped))
    values = [norm, -threshold, -coefficient, *flags]
    if _leaves.size_of(norm) > _CONCATENATED and _are_alone(norm, values):
        # Many norms, such as one per element, are reduced together, since XLA on CPU
        # would materialize the operand of each reduction.
        values = list(_along_last(*(jnp.broadcast_to(x, norm.shape) for x in values)))
    largest = (_maxima.largest(x) if x.ndim else x for x in values[:3])
    return *largest, *map(jnp.sum, values[3:])


def _are_alone(norm: jax.Array, values: list[jax.Array]) -> bool:
    """Return whether these have one dtype and mesh type, and are not sharded by XLA."""
    kinds = {(x.dtype, _axis_names.split_axes(x)) for x in values}
    last = norm.shape[-1]
    # float32 counts exactly only below 2**24, and the bound of a symbolic size is not
    # known.
    is_counted = isinstance(last, int) and last < 2**24
    return len(kinds) == 1 and is_counted and not _xla.may_be_split(norm)


# The joint reduction is differentiated as separate maxima and sums.
@jax.custom_jvp
def _along_last(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Three maxima and two sums along the last axis, in one kernel for all."""
    start = tuple(np.array([-np.inf] * 3 + [0] * 2, values[0].dtype))
    return lax.reduce(values, start, _merged, [values[0].ndim - 1])


@_along_last.defjvp
def _along_last_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    def plain(*values: jax.Array) -> tuple[jax.Array, ...]:
        largest = (jnp.max(x, -1) for x in values[:3])
        return *largest, *(jnp.sum(x, -1) for x in values[3:])

    return _along_last(*primals), jax.jvp(plain, primals, tangents)[1]


def _merged(
    one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    largest = map(_maxima.of_two, one[:3], other[:3])
    return *largest, *map(lax.add, one[3:], other[3:])


def _concatenated(outcomes: Batched) -> Batched:
    """Return outcomes for the record of a tree: slices of many leaves as one row.

    Reducing the slices of each leaf separately accounts for a fifth of AGC's
    compilation time for Llama's shapes.
    """
    pairs = list(zip(outcomes.indices, outcomes.values, strict=True))
    slices = [pair for pair in pairs if _is_concatenated(*pair)]
    if len(slices) < 2:
        return outcomes
    rows = [_as_row(outcome) for _, outcome in slices]
    joined = jax.tree.map(lambda *fields: jnp.concatenate(fields), *rows)
    rest = [pair for pair in pairs if not _is_concatenated(*pair)]
    indices, values = zip(*rest, (slices[0][0], joined), strict=True)
    return Batched.tree_unflatten(indices, values)


def _as_row(outcome: BlockOutcome) -> BlockOutcome:
    """Return the outcome of a leaf's slices as vectors."""
    shape = outcome.norm.shape
    flat = jax.tree.map(lambda x: jnp.broadcast_to(x, shape).ravel(), outcome)
    # No other device has a part of these slices, so no axes are declared.
    return flat._replace(declared=_axis_names.Declared())


def _is_concatenated(index: tuple[int, ...], outcome: BlockOutcome) -> bool:
    """Return whether these are a few slices of one leaf, all on this device."""
    norm, declared = outcome.norm, outcome.declared.axis_name
    axes = _axis_names.split_axes(norm, declared), _axis_names.split_axes(norm)
    is_here = not any(axes) and not _xla.may_be_split(norm)
    return (
        is_here
        and len(index) == 1
        and norm.ndim > 0
        and 0 < _leaves.size_of(norm) <= _CONCATENATED
    )


def _is_common_number(outcome: BlockOutcome) -> bool:
    """Return whether there is one norm, the same on all devices."""
    norm, declared = outcome.norm, outcome.declared.axis_name
    return not norm.ndim and not _axis_names.split_axes(norm, declared)
