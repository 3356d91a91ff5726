"""Check and create the state of a transformation, and record one step in it.

The record contains only numbers that clipping computes anyway, except for the norms of
leaves where the norm of the tree is a mean.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import (
    _axis_names,
    _collectives,
    _leaves,
    _numerics,
    _packed_state,
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
from . import _outcomes

LeafNorms = dict[str, jax.Array] | jax.Array

# The index of the last field of a record, which `of_step` does not compute.
_LEAF_NORM = ClipRecord._fields.index("clip_leaf_norm")

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


def check_state(state: Any, names: list[str], num_memories: int) -> None:
    """Raise unless `init` of such a transformation made this state."""
    if not isinstance(state, ClipState):
        raise TypeError(_validate.must_be("state", "a ClipState", state, ORDER))
    recorded = sorted(map(_packed_state.as_name, state.clip_record))
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


def _check_same_norms(old: ClipRecord, new: ClipRecord) -> None:
    """Raise unless a record has the entries of this scope, `record=` and tree."""
    there, here = (
        {
            _packed_state.as_name(_leaves.path_str(path)): jnp.shape(x)
            for path, x in jax.tree.leaves_with_path(record)
        }
        for record in (old, new)
    )
    both = here.keys() & there.keys()
    parts = (
        ("It lacks", here.keys() - there.keys()),
        ("It has the unknown", there.keys() - here.keys()),
        (
            "Other numbers of layers:",
            {x for x in both if here[x] and there[x][-1:] != here[x]},
        ),
    )
    if differences := [f"{verb} {sorted(x)[:5]}." for verb, x in parts if x]:
        raise ValueError(
            "`state` must have been made with the same over= and record=, for a tree"
            f" like these updates. {' '.join(differences)} {_ADVICE} After a change of"
            " the model, move the state with optclip.carry_over."
        )


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
        pairs = zip(entries.are_layers, shapes, strict=True)
        return entries.keyed(
            [jnp.full(shape if flag else (), value, dtype) for flag, shape in pairs]
        )

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
    pairs = zip(norms.entries(), leaves.blocks, strict=True)
    block = Block([Leaf(x, x, of.leaves[0].path, axis_name=()) for x, of in pairs])
    return clip.norm.measure([block]), leaf_norms


def of_step(
    layout: Layout,
    scope: Scope,
    outcomes: Batched,
    *,
    itemized: bool,
    learns: bool,
) -> ClipRecord:
    """Return the record of a single step, with a flag where the state has a count.

    Args:
      layout: The leaves and the blocks.
      scope: The elements that share a norm.
      outcomes: A `BlockOutcome` for each norm.
      itemized: Whether the record has an entry for each norm.
      learns: Whether a learning rule sets the thresholds.
    """
    flagged = outcomes.map(functools.partial(_flagged, learns))
    if itemized:
        entries = Entries.of(layout)
        of_blocks = _of_blocks(entries, flagged)
        fields = ([each[i] for each in of_blocks] for i in range(_LEAF_NORM))
        new = ClipRecord(*map(entries.keyed, fields))
    else:
        new = _summary(flagged.values)
    return new._replace(clip_fraction=None) if scope.itemized else new


def _flagged(learns: bool, outcome: BlockOutcome) -> BlockOutcome:
    """Return the outcome with a flag for a coefficient that changes its block."""
    if outcome.number is not None:
        return outcome  # Counted already.
    norm, k = outcome.norm, outcome.coefficient
    if learns:
        # Some rules set a threshold of 0 for a leaf of zeros, which clips nothing.
        k = _numerics.select((norm == 0) & (k == k), jnp.ones_like(k), k)
    clipped = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
    return outcome._replace(coefficient=k, clipped=clipped)


def advanced(old: ClipRecord, new: ClipRecord) -> ClipRecord:
    """Return the record after a step; raise if it was made for other norms."""
    _check_same_norms(old, new)

    def count(total: PyTree, once: PyTree) -> PyTree:
        return jax.tree.map(_numerics.counted, total, once)

    # The counts read their old arrays, and so are in place without a barrier.
    return ClipRecord(
        *map(_replaced, old[:4], new[:4]),
        clip_clipped=count(old.clip_clipped, new.clip_clipped),
        clip_nonfinite=count(old.clip_nonfinite, new.clip_nonfinite),
        clip_leaf_norm=_replaced(old.clip_leaf_norm, new.clip_leaf_norm),
    )


def _replaced(old: PyTree, new: PyTree) -> PyTree:
    as_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), new)
    return _xla.in_place(as_float32, old)


def _of_blocks(entries: Entries, outcomes: Batched) -> list[ClipRecord]:
    """Return the record of each block."""
    if not any(entries.are_layers):
        return outcomes.map(lambda outcome: _summary([outcome])).entries()
    pairs = zip(entries.are_layers, outcomes.entries(), strict=True)
    return [_of_layers(x) if flag else _summary([x]) for flag, x in pairs]


def _of_layers(outcome: BlockOutcome) -> ClipRecord:
    """Return the record of each layer of a stack."""
    axes = _axis_names.split_axes(outcome.norm, outcome.declared.axis_name)
    shape = outcome.norm.shape
    columns = (*outcome[:3], outcome.clipped, outcome.nonfinite)
    norm, threshold, coefficient, clipped, nonfinite = (
        _collectives.gathered(jnp.broadcast_to(x, shape).astype(jnp.float32), axes)
        for x in columns
    )
    flags = clipped > 0, nonfinite > 0
    return ClipRecord(norm, threshold, coefficient, clipped, *flags)


def _summary(outcomes: list[BlockOutcome]) -> ClipRecord:
    """Return one number per quantity, the same on all devices that share the blocks."""
    outcomes = [outcome for outcome in outcomes if _leaves.size_of(outcome.norm) > 0]
    if len(outcomes) == 1 and _is_common_number(outcomes[0]):
        norm, threshold, coefficient, nonfinite, _, clipped, _ = outcomes[0]
        fraction = clipped.astype(jnp.float32)
        return ClipRecord(norm, threshold, coefficient, fraction, clipped, nonfinite)
    if outcomes:
        return _outcomes.of_most_exceeded(outcomes)
    zero = jnp.zeros((), jnp.float32)
    no = jnp.zeros((), jnp.bool_)
    return ClipRecord(zero, zero, zero + 1, zero, no, no)


def _is_common_number(outcome: BlockOutcome) -> bool:
    """Return whether there is one norm, the same on all devices."""
    norm, declared = outcome.norm, outcome.declared.axis_name
    return not norm.ndim and not _axis_names.split_axes(norm, declared)
