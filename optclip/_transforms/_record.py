"""Check and create the state of a transformation, and record one step in it.

The record contains only numbers that clipping computes anyway, except for the norms of
leaves where the norm of the tree is a mean. `of_most_exceeded` summarizes many norms.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    _axis_names,
    _collectives,
    _leaves,
    _numerics,
    _packed_state,
    _placement,
    _validate,
    _xla,
)
from .._arrays._batching import Batched
from .._arrays._leaf import Leaf
from .._arrays._types import PyTree, Record, TreeDef
from .._clip import BlockOutcome, Clip, Layout, layout_of
from .._norms import Block, Measured, declared_of, flush_small
from .._scopes import LEAF, Scope
from .._typing import ClipRecord, ClipState
from . import _shared_norms

# A large block is reduced in rows of one of these lengths.
_SHORTEST, _LONGEST = 256, 4096

# Values that differ less than this count as equal. XLA may compute one again for each
# consumer, with other roundings, and none of them must miss the largest.
_NEAR = 1e-6

# Smaller norms than this fraction of the largest one are rounding noise: the gradient
# of a key bias is 0, and is computed as 1e-9. Their ratios to a learned threshold are
# as large as those of other norms.
_NOISE = 1e-6

Values = list[jax.Array]


def of_most_exceeded(
    outcomes: list[BlockOutcome], *, by_rule: bool = False
) -> ClipRecord:
    """Return the record of the norm that exceeds its threshold most.

    Counts and flags cover all norms.

    Args:
      outcomes: Of all blocks; they may lack flags.
      by_rule: Whether a rule of norms sets a threshold. Norms below 1e-6 of the largest
        one then take no part in the choice.
    """
    # A reduction of several arrays has no derivative, so recorded norms are constants.
    outcomes = lax.stop_gradient(outcomes)
    dtype = max((outcome.norm.dtype for outcome in outcomes), key=lambda d: d.itemsize)
    small = [x for x in outcomes if _is_small(x)]
    rest = [_flagged(by_rule, x) for x in outcomes if not _is_small(x)]
    outcomes, here = rest, []
    if small:
        # All leaves are reduced together, so that a GPU launches no kernel for each.
        shaped = [
            [jnp.broadcast_to(x, each.norm.shape).ravel() for x in each[:3]]
            for each in small
        ]
        norm, threshold, k = _joined(shaped, dtype)
        one = BlockOutcome(norm, threshold, k, small[0].declared)
        all_small = _flagged(by_rule, one)
        outcomes, here = [all_small, *rest], [_values(all_small)]
    if by_rule:
        limit = _noise_limit(here, rest)
        here = [[_without_noise(norm, limit), *more] for norm, *more in here]
        rest = [x._replace(norm=_without_noise(x.norm, limit)) for x in rest]
    here += [_as_vectors(x) for x in rest if _is_here(x)]
    split = [_across_devices(x, dtype) for x in rest if not _is_here(x)]
    entries = [*split, _over_axes(_joined(here, dtype))] if here else split
    entries = _placement.together(entries)
    values = entries[0]
    if len(entries) > 1:
        values = _over_axes([jnp.stack(x) for x in zip(*entries, strict=True)])
    norm, threshold, coefficient, nonfinite, clipped = values
    axes = [_axis_names.split_axes(x.clipped, x.declared.axis_name) for x in outcomes]
    pairs = zip(outcomes, axes, strict=True)
    number = sum(x.total() * _axis_names.axes_size(y) for x, y in pairs)
    return ClipRecord(
        clip_norm=norm,
        clip_threshold=threshold,
        clip_coefficient=coefficient,
        clip_fraction=clipped.astype(jnp.float32)
        / _leaves.count_as(number, jnp.float32),
        clip_clipped=clipped > 0,
        clip_nonfinite=nonfinite > 0,
    )


def _joined(entries: list[Values], dtype: jnp.dtype) -> Values:
    """Return vectors of one dtype, joined on one device."""
    columns = zip(*_placement.together(entries), strict=True)
    return [jnp.concatenate([x.astype(dtype) for x in column]) for column in columns]


def _noise_limit(joined: list[Values], rest: list[BlockOutcome]) -> jax.Array:
    """Return the norm below which norms are noise."""
    peaks = [jnp.max(_size(norm)) for norm, *_ in joined]
    for x in rest:
        peak, axes = jnp.max(_size(x.norm)), _declared_axes(x)
        peaks.append(_collectives.reduced_over(lax.pmax, peak, axes))
    return _NOISE * functools.reduce(jnp.maximum, _placement.together(peaks))


def _without_noise(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Return norms, and 0 for noise, whose ratio to any threshold is then 0."""
    is_noise = norm < _placement.beside(limit, norm).astype(norm.dtype)
    return jnp.where(is_noise, jnp.zeros_like(norm), norm)


def _values(outcome: BlockOutcome, dtype: Any = None) -> Values:
    """Return the values of `_over_axes`, which broadcast to the norms."""
    columns = (*outcome[:3], outcome.nonfinite, outcome.clipped)
    return [x.astype(dtype or outcome.norm.dtype) for x in columns]


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
    _, *found = _along_last(
        _rank(rows[0], rows[1] if values[1].ndim else values[1]), *rows
    )
    return found


def _across_devices(outcome: BlockOutcome, dtype: jnp.dtype) -> Values:
    """Return the values of `_over_axes` over all devices that share the block."""
    values, declared = _values(outcome), outcome.declared.axis_name
    axes = [_axis_names.split_axes(x, declared) for x in values]
    values = _over_axes(values)
    if split := tuple(dict.fromkeys(itertools.chain(*axes[:3]))):
        is_common = not outcome.threshold.ndim and not axes[1]
        values[:3] = _most_exceeded(values[:3], split, is_common=is_common)
    for i in (3, 4):
        values[i] = _collectives.reduced_over(lax.psum, values[i], axes[i])
    return [x.astype(dtype) for x in values]


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
        # Flags that broadcast would be counted once per row.
        flags = (jnp.broadcast_to(x, values[0].shape) for x in values[3:])
        most_exceeded = _most_exceeded(values[:3], is_common=not values[1].ndim)
        values = [*most_exceeded, *map(jnp.sum, flags)]
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
        peak = _collectives.largest(x) if x.ndim else x
        return _collectives.reduced_over(_collectives.over_devices, peak, axes)

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
    chosen = map(functools.partial(lax.select, is_first), one[:4], other[:4])
    return *chosen, *map(lax.add, one[4:], other[4:])


def _is_small(outcome: BlockOutcome) -> bool:
    """Return whether the norms are reduced with those of other blocks."""
    is_raw = outcome.nonfinite is None and outcome.number is None
    return is_raw and _leaves.size_of(outcome.norm) <= _xla.FEW and _is_here(outcome)


def _declared_axes(outcome: BlockOutcome) -> _axis_names.Axes:
    """Return the mapped axes that split the norms of a block."""
    return _axis_names.split_axes(outcome.norm, outcome.declared.axis_name)


def _is_here(outcome: BlockOutcome) -> bool:
    """Return whether all norms of a block are on this device."""
    is_split = _declared_axes(outcome) or _axis_names.split_axes(outcome.norm)
    return not is_split and not _xla.may_be_split(outcome.norm)


# The index of the last field of a record, which `of_step` does not compute.
_LEAF_NORM = ClipRecord._fields.index("clip_leaf_norm")

_ADVICE = "Pass the state that this transformation's init or last update returned."
ORDER = (
    "The order is tx.update(updates, state, params). Pass the state of this"
    " transformation's init; in a chain, call the chain's update."
)


def check_record(record: Record, name: object) -> None:
    """Raise unless these are a `record=` and a `name=`."""
    is_valid = isinstance(record, (bool, str)) and record in (True, False, "leaves")
    _validate.require(
        "record", record, is_valid, "True, False or 'leaves'", error=TypeError
    )
    is_name = isinstance(name, str) and name != ""
    _validate.require("name", name, is_name, "a non-empty string", error=TypeError)


class Entries(NamedTuple):
    """Describe the entries of a record with one per block.

    Attributes:
      treedef: The structure of the norms.
      are_layers: For each block, whether its entry has one number per layer.
    """

    treedef: TreeDef
    are_layers: tuple[bool, ...]

    @classmethod
    def of(cls, layout: Layout) -> Entries:
        """Return the entries of a laid out tree."""
        flags = tuple(block.stacked is not None for block in layout.blocks)
        return cls(layout.treedef, flags)

    def keyed(self, values: Sequence[Any]) -> Any:
        """Return a dict by path of one value per block; see `_packed_state.keyed`."""
        pairs = zip(self.are_layers, values, strict=True)
        packed = [{_packed_state.LAYERS: x} if flag else x for flag, x in pairs]
        return _packed_state.keyed(self.treedef, packed)


def shape_of(block: Block, norm: jax.Array) -> tuple[int, ...]:
    """Return the shape of the record of a block: its layers on all devices, or one."""
    if block.stacked is None:
        return ()
    axes = _axis_names.split_axes(norm, declared_of(block).axis_name)
    return (norm.shape[0] * _axis_names.axes_size(axes),)


def memory_in(
    state: Any, names: list[str], measured: str, num_memories: int, *, learns: bool
) -> list[PyTree]:
    """Return the memories; raise unless `init` of such a transformation made them."""
    _validate.kind("state", state, ClipState, "a ClipState", ORDER)
    recorded = sorted(map(_packed_state.as_name, state.clip_record))
    if recorded != names:
        raise ValueError(
            f"`state` must have the records {names}, got {recorded}; record=False has"
            " none. Pass the record= and name= that made the state, or create a new"
            " state with init."
        )
    learned, memory = "", state.clip_memory
    if isinstance(memory, Mapping):
        ((learned, memory),) = memory.items()
    if learned != measured and (learned or learns):
        raise ValueError(
            f"`state` must have been learned from the norms {measured!r}, got"
            f" {learned or 'a fixed threshold'!r}: its thresholds do not apply."
            f" {_ADVICE} After a change of norm=, over= or the threshold, move it with"
            " optclip.carry_over."
        )
    if num_memories != len(memory):
        raise ValueError(
            "`state` belongs to another transformation (rule memories:"
            f" {len(memory)}, expected {num_memories}). {_ADVICE}"
        )
    return memory


def _check_same_norms(old: ClipRecord, new: ClipRecord) -> None:
    """Raise unless a record has the entries of this scope, `record=` and tree."""
    there, here = (
        {
            _packed_state.as_name(_leaves.path_str(path)): jnp.shape(x)
            for path, x in jax.tree.leaves_with_path(record)
        }
        for record in (old, new)
    )
    # A state that was cut to one layer has an entry without an axis: 0 layers.
    layers = {
        f"{_norm_of(x)} has {here[x][0]} layers, and {sum(there[x][-1:])} in the state"
        for x in here.keys() & there.keys()
        if here[x] and there[x][-1:] != here[x]
    }
    differences = [
        f"{verb} {sorted(set(map(_norm_of, entries)))[:5]}."
        for verb, entries in (
            ("It lacks", here.keys() - there.keys()),
            ("It has the unknown", there.keys() - here.keys()),
        )
        if entries
    ]
    differences += [f"{x}." for x in sorted(layers)[:5]]
    if differences:
        cause = _likely_cause(here.keys(), there.keys())
        raise ValueError(
            "`state` must have been made with the same over= and record=, for a tree"
            f" like these updates. {' '.join(differences)} Most likely {cause} changed."
            f" {_ADVICE} After a change of the model, move the state with"
            " optclip.carry_over. With pmap or check_vma=False, call init outside."
        )


def _norm_of(entry: str) -> str:
    """Return the name of the norm that an entry of a record describes."""
    field, _, norm = entry.partition("/")
    return norm or (field if field == "clip_fraction" else "one entry for all norms")


def _likely_cause(here: Collection[str], there: Collection[str]) -> str:
    """Return what has probably changed between two records, by their entries."""

    def differ(prefix: str) -> bool:
        ours, theirs = (any(x.startswith(prefix) for x in y) for y in (here, there))
        return ours != theirs

    # Only scopes with several norms per entry record a fraction. The others, the tree
    # and groups, have the same norms with and without `record="leaves"`.
    has_fraction = any(x.startswith("clip_fraction") for x in here)
    if differ("clip_fraction") or (differ("clip_norm/") and not has_fraction):
        return "over="
    is_record = differ("clip_norm/") or differ("clip_leaf_norm")
    return "record=" if is_record else "over= or the tree"


def blank(
    entries: Entries,
    shapes: Sequence[tuple[int, ...]],
    scope: Scope,
    *,
    itemized: bool,
) -> ClipRecord:
    """Return the record before the first step, for norms of these shapes."""

    def full(value: float, dtype: Any) -> Any:
        if not itemized:
            return jnp.full((), value, dtype)
        return entries.keyed([jnp.full(shape, value, dtype) for shape in shapes])

    return ClipRecord(
        clip_norm=full(0, jnp.float32),
        clip_threshold=full(0, jnp.float32),
        clip_coefficient=full(1, jnp.float32),
        clip_fraction=None if scope.itemized else full(0, jnp.float32),
        clip_clipped=full(0, jnp.int32),
        clip_nonfinite=full(0, jnp.int32),
    )


class NormsOfLeaves(NamedTuple):
    """Hold the norm of each leaf, also below the least that is told from 0."""

    treedef: TreeDef
    norms: Batched

    def by_path(self) -> PyTree:
        entries = self.norms.map(flush_small).entries()
        return _packed_state.keyed(self.treedef, entries)


def measure_leaves(
    clip: Clip, layout: Layout, updates: PyTree
) -> tuple[Measured, NormsOfLeaves]:
    """Return the norm of the tree, and of each leaf.

    The gradients are read once if the norm of all leaves is the norm of their norms.
    """
    leaves = layout_of(dataclasses.replace(clip, scope=LEAF), updates)
    norms = _shared_norms.measured(clip.norm, leaves.blocks, flushed=False).norms
    leaf_norms = NormsOfLeaves(leaves.treedef, norms)
    if not clip.norm.composes:
        return _shared_norms.measured(clip.norm, layout.blocks), leaf_norms
    # Each norm already spans its devices.
    pairs = zip(norms.entries(), leaves.blocks, strict=True)
    block = Block([Leaf(x, x, of.leaves[0].path, axis_name=()) for x, of in pairs])
    return clip.norm.measure([block]), leaf_norms


def of_step(
    layout: Layout,
    scope: Scope,
    outcomes: Batched,
    *,
    itemized: bool,
    by_rule: bool,
) -> ClipRecord:
    """Return the record of a single step, with a flag where the state has a count.

    Args:
      layout: The leaves and the blocks.
      scope: The elements that share a norm.
      outcomes: A `BlockOutcome` for each norm.
      itemized: Whether the record has an entry for each norm.
      by_rule: Whether a rule of norms sets a threshold.
    """
    if itemized:
        entries = Entries.of(layout)
        flagged = outcomes.map(functools.partial(_flagged, by_rule))
        of_blocks = _of_blocks(entries, flagged)
        fields = ([each[i] for each in of_blocks] for i in range(_LEAF_NORM))
        new = ClipRecord(*map(entries.keyed, fields))
    else:
        new = _summary(outcomes.values, by_rule=by_rule)
    return new._replace(clip_fraction=None) if scope.itemized else new


def _flagged(by_rule: bool, outcome: BlockOutcome) -> BlockOutcome:
    """Return the outcome with flags, one for a coefficient that changes its block."""
    norm, limit, k, *_ = outcome
    if outcome.nonfinite is None:
        outcome = outcome._replace(nonfinite=~jnp.isfinite(norm))
    if outcome.clipped is not None:
        return outcome
    if by_rule:
        # Where a norm is not finite, `_thresholds/_learning` has replaced inf.
        largest = np.array(np.finfo(np.float32).max, limit.dtype)
        is_replaced = outcome.nonfinite & (limit >= largest)
        limit = _numerics.select(is_replaced, jnp.full_like(limit, jnp.inf), limit)
        # Some rules set a threshold of 0 for a leaf of zeros, which clips nothing.
        k = _numerics.select((norm == 0) & (k == k), jnp.ones_like(k), k)
    clipped = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
    return outcome._replace(threshold=limit, coefficient=k, clipped=clipped)


def advanced(old: ClipRecord, new: ClipRecord) -> ClipRecord:
    """Return the record after a step; raise if it was made for other norms."""
    _check_same_norms(old, new)
    count = functools.partial(jax.tree.map, _numerics.counted)
    # The counts read their old arrays, and so are in place without a barrier.
    return ClipRecord(
        *map(_replaced, old[:4], new[:4]),
        clip_clipped=count(old.clip_clipped, new.clip_clipped),
        clip_nonfinite=count(old.clip_nonfinite, new.clip_nonfinite),
        clip_leaf_norm=_replaced(old.clip_leaf_norm, new.clip_leaf_norm),
    )


def _replaced(old: PyTree, new: PyTree) -> PyTree:
    return _xla.in_place(jax.tree.map(lambda x: x.astype(jnp.float32), new), old)


def _of_blocks(entries: Entries, outcomes: Batched) -> list[ClipRecord]:
    """Return the record of each block."""
    if not any(entries.are_layers):
        return outcomes.map(lambda outcome: _summary([outcome])).entries()
    return [
        _of_layers(x) if flag else _summary([x])
        for flag, x in zip(entries.are_layers, outcomes.entries(), strict=True)
    ]


def _of_layers(outcome: BlockOutcome) -> ClipRecord:
    """Return the record of each layer of a stack."""
    axes = _declared_axes(outcome)
    norm, threshold, coefficient, nonfinite, clipped = (
        _collectives.gathered(jnp.broadcast_to(x, outcome.norm.shape), axes)
        for x in _values(outcome, jnp.float32)
    )
    flags = clipped > 0, nonfinite > 0
    return ClipRecord(norm, threshold, coefficient, clipped, *flags)


def _summary(outcomes: list[BlockOutcome], *, by_rule: bool = False) -> ClipRecord:
    """Return one number per quantity, the same on all devices that share the blocks."""
    outcomes = [outcome for outcome in outcomes if _leaves.size_of(outcome.norm) > 0]
    one = outcomes[0] if len(outcomes) == 1 else None
    # One norm that is the same on all devices needs no choice.
    if one is not None and not (one.norm.ndim or _declared_axes(one)):
        one = _flagged(by_rule, one)
        fraction = one.clipped.astype(jnp.float32)
        return ClipRecord(*one[:3], fraction, one.clipped, one.nonfinite)
    if outcomes:
        return of_most_exceeded(outcomes, by_rule=by_rule)
    zero, no = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    return ClipRecord(zero, zero, zero + 1, zero, no, no)
