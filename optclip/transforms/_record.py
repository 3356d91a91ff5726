"""The record of a step, in the numbers that the state keeps.

Recorded is what was computed anyway.
"""

import functools
from collections.abc import Sequence
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
from optclip._arrays._types import PyTree, Record, TreeDef
from optclip.scopes._interface import Scope
from optclip.transforms._state import is_itemized
from optclip.typing import ClipRecord

# The place of the last field of a record, which a step does not bring itself.
_LEAF_NORM = ClipRecord._fields.index("clip_leaf_norm")

# Leaves with more norms than this are not concatenated, since that takes a copy.
_CONCATENATED = 2**16


class BlockOutcome(NamedTuple):
    """What one step brought for one block, or for a row of blocks."""

    norm: jax.Array
    threshold: jax.Array
    coefficient: jax.Array
    clipped: jax.Array
    bad: jax.Array
    declared: _axis_names.Declared


def of_step(
    treedef: TreeDef,
    scope: Scope,
    record: Record,
    columns: Sequence[Batched],
    *,
    learns: bool,
) -> ClipRecord:
    """What a step alone brought: a flag where the record has a count.

    `columns` are the norms, thresholds, coefficients, whether each is not finite, and
    what is declared of it; `learns` says whether the thresholds are a rule's.
    """
    itemized = is_itemized(scope, record)
    norms, *others = columns if itemized else _concatenated(list(columns))
    steps = norms.map(functools.partial(_step, learns), *others)
    if itemized:
        entries = steps.map(lambda step: _summary([step])).entries()
        fields = ([e[i] for e in entries] for i in range(_LEAF_NORM))
        new = ClipRecord(*(_packed_state.keyed(treedef, field) for field in fields))
    else:
        new = _summary(steps.values)
    return new._replace(clip_fraction=None) if scope.itemized else new


def _step(
    learns: bool,
    norm: jax.Array,
    threshold: jax.Array,
    coefficient: jax.Array,
    bad: jax.Array,
    declared: _axis_names.Declared,
) -> BlockOutcome:
    k = coefficient
    if learns:
        # Some rules give a leaf of zeros a threshold of 0, and nothing is clipped.
        k = _numerics.select((norm == 0) & (k == k), jnp.ones_like(k), k)
    clipped = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
    return BlockOutcome(norm, threshold, k, clipped, bad, declared)


def advanced(old: ClipRecord, new: ClipRecord) -> ClipRecord:
    """The record after a step."""

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


def _summary(steps: list[BlockOutcome]) -> ClipRecord:
    """One number for each quantity, the same on all devices that share the blocks."""
    steps = [step for step in steps if _leaves.size_of(step.norm) > 0]
    if len(steps) == 1 and not steps[0].norm.ndim and not _differs(steps[0]):
        norm, threshold, coefficient, clipped, bad, _ = steps[0]
        fraction = clipped.astype(jnp.float32)
        return ClipRecord(norm, threshold, coefficient, fraction, clipped, bad)
    if not steps:
        zero = jnp.zeros((), jnp.float32)
        no = jnp.zeros((), jnp.bool_)
        return ClipRecord(zero, zero, zero + 1, zero, no, no)
    dtype = max((step.norm.dtype for step in steps), key=lambda d: d.itemsize)
    entries = [[x.astype(dtype) for x in _across_devices(step)] for step in steps]
    norm, threshold, coefficient, bad, clipped = zip(*entries, strict=True)

    def largest(values: tuple[jax.Array, ...]) -> jax.Array:
        return values[0] if len(values) == 1 else _maxima.largest(jnp.stack(values))

    count = functools.reduce(jnp.add, clipped).astype(jnp.float32)
    number = sum(
        step.clipped.size * _axis_names.axes_size(_split(step)) for step in steps
    )
    return ClipRecord(
        clip_norm=largest(norm),
        clip_threshold=-largest(threshold),
        clip_coefficient=-largest(coefficient),
        clip_fraction=count / _leaves.count_as(number, jnp.float32),
        clip_clipped=count > 0,
        clip_nonfinite=functools.reduce(jnp.add, bad) > 0,
    )


def _across_devices(step: BlockOutcome) -> list[jax.Array]:
    """Of the blocks of a step, on all devices that share them, what `_reduced` says."""
    declared = step.declared.axis_name
    across = _maxima.over_devices
    how = [(x, across) for x in (step.norm, step.threshold, step.coefficient)]
    how += [(x, lax.psum) for x in (step.bad, step.clipped)]
    return [
        _collectives.spanning(collective, value, _axis_names.split_axes(of, declared))
        for value, (of, collective) in zip(_reduced(step), how, strict=True)
    ]


def _reduced(step: BlockOutcome) -> tuple[jax.Array, ...]:
    """The largest norm, -threshold and -coefficient; how many are bad, and clipped."""
    bad, clipped = (x.astype(step.norm.dtype) for x in (step.bad, step.clipped))
    values = [step.norm, -step.threshold, -step.coefficient, bad, clipped]
    if _leaves.size_of(step.norm) > _CONCATENATED and _are_alone(step.norm, values):
        # Many norms, such as one per element, are reduced together, since XLA on CPU
        # would materialize the operand of each reduction.
        spread = (jnp.broadcast_to(x, step.norm.shape) for x in values)
        values = list(_along_last(*spread))
    largest = (_maxima.largest(x) if x.ndim else x for x in values[:3])
    return *largest, *map(jnp.sum, values[3:])


def _are_alone(norm: jax.Array, values: list[jax.Array]) -> bool:
    """Whether these are of one dtype and one type on a mesh, and not sharded by XLA."""
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
def _along_last_jvp(primals: Any, tangents: Any) -> Any:
    def plain(*values: jax.Array) -> tuple[jax.Array, ...]:
        largest = (jnp.max(x, -1) for x in values[:3])
        return *largest, *(jnp.sum(x, -1) for x in values[3:])

    return _along_last(*primals), jax.jvp(plain, primals, tangents)[1]


def _merged(
    one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    largest = map(_maxima.of_two, one[:3], other[:3])
    return *largest, *map(lax.add, one[3:], other[3:])


def _concatenated(columns: list[Batched]) -> list[Batched]:
    """The same for the record of a tree: slices of many leaves as those of one.

    To look through those of each leaf by itself takes a fifth of the time in which AGC
    compiles for Llama's shapes. The last column is what is declared.
    """
    entries = list(zip(columns[0].indices, *(c.values for c in columns), strict=True))
    slices = [entry for entry in entries if _is_concatenated(entry)]
    if len(slices) < 2:
        return columns
    norms, *others = list(zip(*slices, strict=True))[1:-1]
    one = [
        jnp.concatenate(
            [
                jnp.broadcast_to(x, n.shape).ravel()
                for x, n in zip(xs, norms, strict=True)
            ]
        )
        for xs in (norms, *others)
    ]
    left = [entry for entry in entries if not _is_concatenated(entry)]
    entries = [*left, (slices[0][0], *one, _axis_names.Declared())]
    indices, *values = zip(*entries, strict=True)
    return [Batched.tree_unflatten(indices, column) for column in values]


def _is_concatenated(entry: Any) -> bool:
    """Whether these are slices of one leaf, few enough, that no other device has."""
    index, norm, *_, declared = entry
    axes = (
        _axis_names.split_axes(norm, declared.axis_name),
        _axis_names.split_axes(norm),
    )
    is_here = not any(axes) and not _xla.may_be_split(norm)
    return (
        is_here
        and len(index) == 1
        and norm.ndim > 0
        and 0 < _leaves.size_of(norm) <= _CONCATENATED
    )


def _split(step: BlockOutcome) -> _axis_names.Axes:
    return _axis_names.split_axes(step.clipped, step.declared.axis_name)


def _differs(step: BlockOutcome) -> bool:
    """Whether it is another one on each device."""
    return bool(_axis_names.split_axes(step.norm, step.declared.axis_name))
