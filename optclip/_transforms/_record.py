"""Check and create the state of a transformation, and record one step in it.

The record contains only numbers that clipping computes anyway, except for the norms of
leaves where the norm of the tree is a mean.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    _axis_names,
    _collectives,
    _leaves,
    _maxima,
    _numerics,
    _packed_state,
    _validate,
    _xla,
)
from .._arrays._batching import Batched
from .._arrays._leaf import Leaf
from .._arrays._types import PyTree, Record, TreeDef
from .._clip import Clip, Layout, layout_of
from .._norms import Block, Measured, flush_small
from .._scopes import LEAF, Scope
from .._typing import ClipRecord, ClipState

LeafNorms = dict[str, jax.Array] | jax.Array

# The index of the last field of a record, which `of_step` does not compute.
_LEAF_NORM = ClipRecord._fields.index("clip_leaf_norm")

# Leaves with more norms than this are not concatenated, since that takes a copy.
_CONCATENATED = 2**16

_ADVICE = "Pass the state that this transformation's init or last update returned."
ORDER = (
    "The order is tx.update(updates, state, params). Pass the state of this"
    " transformation's init; in a chain, call the chain's update."
)


def check_record(record: Record, name: object) -> None:
    """Raise unless these are a `record=` and a `name=`."""
    words = isinstance(record, str) and record == "leaves"
    if not words and not isinstance(record, bool):
        raise TypeError(_validate.must_be("record", "True, False or 'leaves'", record))
    if not isinstance(name, str) or not name:
        raise TypeError(_validate.must_be("name", "a non-empty string", name))


def check_state(
    state: Any,
    names: list[str],
    num_memories: int,
    treedef: TreeDef,
    scope: Scope,
    *,
    itemized: bool,
) -> None:
    """Raise unless `init` of this transformation made this state for such updates."""
    if not isinstance(state, ClipState):
        raise TypeError(_validate.must_be("state", "a ClipState", state, ORDER))
    recorded = sorted(state.clip_record)
    if recorded != names:
        raise ValueError(
            f"`state` must have the records {names}, got {recorded}; record=False has"
            " none. Pass the record= and name= that made the state, or create a new"
            " state with init."
        )
    if num_memories != len(state.clip_memory):
        raise ValueError(
            "`state` belongs to another transformation (rule memories:"
            f" {len(state.clip_memory)}, expected {num_memories}). {_ADVICE}"
        )
    for each in state.clip_record.values():
        _check_entries(each, treedef, scope, itemized=itemized)


def _check_entries(
    clip_record: ClipRecord, treedef: TreeDef, scope: Scope, *, itemized: bool
) -> None:
    """Raise unless a record has the entries of this scope, `record=` and tree."""
    norm = clip_record.clip_norm
    wanted = _packed_state.keyed(treedef, [0] * treedef.num_leaves) if itemized else 0
    is_of_scope = (clip_record.clip_fraction is None) == scope.itemized
    if jax.tree.leaves(wanted) and not is_of_scope:
        raise ValueError(f"`state` was made with another scope (over=). {_ADVICE}")
    if isinstance(norm, dict) != isinstance(wanted, dict) and not scope.itemized:
        made, used = (
            ("'leaves'", True) if isinstance(norm, dict) else (True, "'leaves'")
        )
        raise ValueError(
            f"`state` must have been made with the same `record=`, {used}, got the"
            f" state of record={made}. {_ADVICE}"
        )
    _check_same("norms", norm, wanted)


def _check_leaf_norms(record: ClipRecord, leaf_norms: PyTree) -> None:
    """Raise unless the record was made for such leaves."""
    if (record.clip_leaf_norm is None) != (leaf_norms is None):
        raise ValueError(
            "`state` must have been made with the same `record=`, got one"
            f" {'without' if record.clip_leaf_norm is None else 'with'} norms of"
            f" leaves. {_ADVICE}"
        )
    _check_same("leaves", record.clip_leaf_norm, leaf_norms)


def _check_same(kind: str, recorded: PyTree, entries: PyTree) -> None:
    """Raise unless the updates have the entries that the state recorded."""
    if jax.tree.structure(recorded) == jax.tree.structure(entries):
        return
    old, new = (
        x.keys() if isinstance(x, dict) else {"the whole tree"}
        for x in (recorded, entries)
    )
    parts = (("They lack", old - new), ("They have the unknown", new - old))
    differences = [f" {verb} {sorted(names)[:5]}." for verb, names in parts if names]
    raise ValueError(
        f"The updates must have the same {kind} as the state.{''.join(differences)}"
        " Pass trees of one structure to init and update."
    )


def blank(treedef: TreeDef, scope: Scope, *, itemized: bool) -> ClipRecord:
    """Return the record before the first step, for norms of the structure `treedef`."""

    def full(value: float, dtype: Any) -> Any:
        if not itemized:
            return jnp.full((), value, dtype)
        entries = [jnp.full((), value, dtype) for _ in range(treedef.num_leaves)]
        return _packed_state.keyed(treedef, entries)

    fraction = None if scope.itemized else full(0, jnp.float32)
    return ClipRecord(
        clip_norm=full(0, jnp.float32),
        clip_threshold=full(0, jnp.float32),
        clip_coefficient=full(1, jnp.float32),
        clip_fraction=fraction,
        clip_clipped=full(0, jnp.int32),
        clip_nonfinite=full(0, jnp.int32),
    )


def blank_leaf_norms(treedef: TreeDef) -> LeafNorms:
    """Return the norms before the first step."""
    zeros = [jnp.zeros((), jnp.float32) for _ in range(treedef.num_leaves)]
    return _packed_state.keyed(treedef, zeros)


def measure_leaves(
    clip: Clip, layout: Layout, updates: PyTree
) -> tuple[Measured, LeafNorms]:
    """Return the norm of the tree, and of each leaf by its path.

    The gradients are read once, unless the norm is a mean: the norm of all leaves is
    the norm of their norms.
    """
    leaves = layout_of(dataclasses.replace(clip, scope=LEAF), updates)
    norms = clip.norm.measure(leaves.blocks, flushed=False).norms
    flushed = norms.map(flush_small).entries()
    leaf_norms = _packed_state.keyed(leaves.treedef, flushed)
    if clip.norm.is_a_mean:
        # The mean is computed from all elements, since a mean of means differs from it.
        return clip.norm.measure(layout.blocks), leaf_norms
    # Each norm already spans its devices.
    block = Block([Leaf(norm, norm, axis_name=()) for norm in norms.entries()])
    return clip.norm.measure([block]), leaf_norms


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
    """Return the record after a step; raise if it was made for other leaves."""
    _check_leaf_norms(old, new.clip_leaf_norm)

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
