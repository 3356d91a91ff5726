"""RECORD: what a clip keeps in the optimizer state, and how it is brought there.

Fixed in structure, shapes and dtypes from `init` on. Recorded is what was computed
anyway.
"""

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
    _numerics,
    _validate,
    _xla,
)
from optclip._arrays._batching import Batched
from optclip._arrays._types import Record
from optclip.scopes import TREE

# More numbers of a leaf are not joined with others: it takes a copy.
_JOINED = 2**16


class ClipRecord(NamedTuple):
    """What a clip did in its last step, and how often it did something.

    For the tree each field is a scalar, for groups a dict of scalars by label. For
    leaves, axes and elements it is a scalar over all blocks or, with
    `record="leaves"`, a tree of scalars, one a leaf.

    Attributes:
      clip_norm: float32, the norm before the clip; the largest, of several.
      clip_threshold: float32; the smallest, of several.
      clip_coefficient: float32, what the updates were multiplied by; the smallest.
      clip_fraction: float32, the fraction of norms past their threshold in the last
        step; None for the tree and groups.
      clip_clipped: int32, the number of steps in which anything was clipped; what
        was zeroed or made NaN for a non-finite norm does not count as clipped.
      clip_nonfinite: int32, the number of steps with a norm that was not finite: of a
        NaN or inf entry, or above the largest float.
    """

    clip_norm: Any
    clip_threshold: Any
    clip_coefficient: Any
    clip_fraction: Any
    clip_clipped: Any
    clip_nonfinite: Any


class SkipRecord(NamedTuple):
    """How often `skip` left out a step.

    Attributes:
      skip_skipped: int32, the number of steps skipped so far.
      skip_consecutive: int32, how many of them were the last ones without a break.
      skip_value: float32, the last `value`, if `max_value` looks at it; else None.
      skip_value_threshold: float32, what it was compared with; likewise.
    """

    skip_skipped: jax.Array
    skip_consecutive: jax.Array
    skip_value: Any = None
    skip_value_threshold: Any = None


class ClipState(NamedTuple):
    """The state of every optclip transformation.

    Attributes:
      clip_step: int32, the number of updates so far.
      clip_memory: what the threshold's rules remember; empty for numbers, schedules.
      clip_record: a dict from the name of the clip to its `ClipRecord`; empty with
        `record=False`.
    """

    clip_step: jax.Array
    clip_memory: Any
    clip_record: dict[str, ClipRecord]


class Step(NamedTuple):
    """What one step brought for one block, or for a row of blocks."""

    norm: jax.Array
    threshold: jax.Array
    coefficient: jax.Array
    clipped: jax.Array
    bad: jax.Array
    declared: _axis_names.Declared


def check(record: Record, name: Any, scope: Any) -> None:
    """Raise unless these are a `record=` and a `name=`."""
    words = isinstance(record, str) and record == "leaves"
    if not words and not isinstance(record, bool):
        raise TypeError(_validate.must_be("record", "True, False or 'leaves'", record))
    if words and scope is TREE:
        raise ValueError(
            "`record` must be True or False for a clip with one norm for the tree, got"
            " 'leaves'. Put clip_by_norm(inf, record='leaves', name='watch') before it,"
            " which measures each leaf and clips none."
        )
    if not isinstance(name, str) or not name:
        raise TypeError(_validate.must_be("name", "a non-empty string", name))


def check_state(
    state: Any,
    num_rules: int,
    treedef: Any,
    name: str,
    scope: Any,
    record: Record,
) -> None:
    """Raise unless `init` of this clip made such a state for such updates."""
    names = [name] if record else []
    advice = "Give the state that init of this very transformation returned"
    if not isinstance(state, ClipState):
        advice = f"{advice}, or that the update before returned."
        raise TypeError(_validate.must_be("state", "a ClipState", state, advice))
    found = sorted(state.clip_record)
    if found != names or num_rules != len(state.clip_memory):
        raise ValueError(
            "`state` must be of this clip, got that of another, with"
            f" {len(state.clip_memory)} thresholds and records for {found}. {advice}."
        )
    kept = [jax.tree.structure(state.clip_record[n].clip_norm) for n in found]
    itemized = scope.itemized or record == "leaves"
    wanted = treedef if itemized else jax.tree.structure(0)
    if any(k != wanted for k in kept):
        raise ValueError(
            f"The updates must have norms of the structure that the state was made for,"
            f" {kept[0]}, got {wanted}. Give init and update trees of one structure."
        )
    fractions = [state.clip_record[n].clip_fraction is None for n in found]
    if wanted.num_leaves and any(is_none != scope.itemized for is_none in fractions):
        raise ValueError(f"`state` must be of a clip over the same scope. {advice}.")


def blank(treedef: Any, scope: Any, record: Record) -> ClipRecord:
    """The record before the first step, for norms of the structure `treedef`."""
    itemized = scope.itemized or record == "leaves"

    def full(value: float, dtype: Any) -> Any:
        if not itemized:
            return jnp.full((), value, dtype)
        entries = [jnp.full((), value, dtype) for _ in range(treedef.num_leaves)]
        return jax.tree.unflatten(treedef, entries)

    fraction = None if scope.itemized else full(0, jnp.float32)
    return ClipRecord(
        clip_norm=full(0, jnp.float32),
        clip_threshold=full(0, jnp.float32),
        clip_coefficient=full(1, jnp.float32),
        clip_fraction=fraction,
        clip_clipped=full(0, jnp.int32),
        clip_nonfinite=full(0, jnp.int32),
    )


def of_step(treedef: Any, scope: Any, record: Record, steps: Batched) -> ClipRecord:
    """What a step alone brought: a flag where the record has a count."""
    if scope.itemized or record == "leaves":
        entries = steps.map(lambda step: _summary([step])).entries()
        columns = (
            [entry[i] for entry in entries] for i in range(len(ClipRecord._fields))
        )
        new = ClipRecord(*(jax.tree.unflatten(treedef, c) for c in columns))
    else:
        new = _summary(steps.values)
    return new._replace(clip_fraction=None) if scope.itemized else new


def advanced(old: ClipRecord, new: ClipRecord) -> ClipRecord:
    """The record after a step."""

    def count(total: Any, once: Any) -> Any:
        return jax.tree.map(_numerics.counted, total, once)

    return ClipRecord(
        *(jax.tree.map(lambda n: n.astype(jnp.float32), field) for field in new[:4]),
        clip_clipped=count(old.clip_clipped, new.clip_clipped),
        clip_nonfinite=count(old.clip_nonfinite, new.clip_nonfinite),
    )


def _summary(steps: list[Step]) -> ClipRecord:
    """One number for each quantity, the same on all devices that share the blocks."""
    if len(steps) == 1 and not steps[0].norm.ndim and not _differs(steps[0]):
        norm, threshold, coefficient, clipped, bad, _ = steps[0]
        fraction = clipped.astype(jnp.float32)
        return ClipRecord(norm, threshold, coefficient, fraction, clipped, bad)
    if not steps:
        zero = jnp.zeros((), jnp.float32)
        no = jnp.zeros((), jnp.bool_)
        return ClipRecord(zero, zero, zero + 1, zero, no, no)
    found = [_across_devices(step) for step in steps]
    norm, threshold, coefficient, bad, clipped = zip(*found, strict=True)

    def largest(values: tuple[jax.Array, ...]) -> jax.Array:
        return values[0] if len(values) == 1 else jnp.max(jnp.stack(values))

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
        clip_nonfinite=largest(bad) > 0,
    )


def _across_devices(step: Step) -> list[jax.Array]:
    """Of the blocks of a step, on all devices that share them, what `_reduced` says."""
    declared = step.declared.axis_name
    how = [(x, lax.pmax) for x in (step.norm, step.threshold, step.coefficient)]
    how += [(step.bad, lax.pmax), (step.clipped, lax.psum)]
    return [
        _collectives.spanning(collective, value, _axis_names.split_axes(of, declared))
        for value, (of, collective) in zip(_reduced(step), how, strict=True)
    ]


def _reduced(step: Step) -> tuple[jax.Array, ...]:
    """The most of norm, -threshold, -coefficient and bad, and how many are clipped."""
    bad, clipped = (x.astype(step.norm.dtype) for x in (step.bad, step.clipped))
    values = [step.norm, -step.threshold, -step.coefficient, bad, clipped]
    if _leaves.size_of(step.norm) > _JOINED and _are_alone(step.norm, values):
        # Of elements, say. XLA on CPU would materialize what each reduction reads.
        spread = (jnp.broadcast_to(x, step.norm.shape) for x in values)
        values = list(_along_last(*spread))
    *most, clipped = values
    found = (jnp.max(x, initial=-jnp.inf) if x.ndim else x for x in most)
    return *found, jnp.sum(clipped)


def _are_alone(norm: jax.Array, values: list[jax.Array]) -> bool:
    """Whether these are of one dtype and one type on a mesh, and not sharded by XLA."""
    kinds = {(x.dtype, _axis_names.split_axes(x)) for x in values}
    last = norm.shape[-1]
    # More than that float32 does not count; and not by a size that is a symbol.
    is_counted = isinstance(last, int) and last < 2**24
    return len(kinds) == 1 and is_counted and not _xla.may_be_split(norm)


@jax.custom_jvp
def _along_last(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Maxima, and the sum of the last, along the last axis, in one kernel for all."""
    start = [-np.inf] * (len(values) - 1) + [0]
    start = tuple(np.array(start, values[0].dtype))
    return lax.reduce(values, start, _merged, [values[0].ndim - 1])


@_along_last.defjvp
def _along_last_jvp(primals: Any, tangents: Any) -> Any:
    def plain(*values: jax.Array) -> tuple[jax.Array, ...]:
        return *(jnp.max(x, -1) for x in values[:-1]), jnp.sum(values[-1], -1)

    return _along_last(*primals), jax.jvp(plain, primals, tangents)[1]


def _merged(
    one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    most = map(lax.max, one[:-1], other[:-1])
    return *most, one[-1] + other[-1]


def joined(columns: list[Batched]) -> list[Batched]:
    """The same for the record of a tree: slices of many leaves as those of one.

    To look through those of each leaf by itself takes a fifth of the time in which AGC
    compiles for Llama's shapes. The last column is what is declared.
    """
    entries = list(zip(columns[0].indices, *(c.values for c in columns), strict=True))
    slices = [entry for entry in entries if _is_joined(entry)]
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
    left = [entry for entry in entries if not _is_joined(entry)]
    entries = [*left, (slices[0][0], *one, _axis_names.Declared())]
    indices, *values = zip(*entries, strict=True)
    return [Batched.tree_unflatten(indices, column) for column in values]


def _is_joined(entry: Any) -> bool:
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
        and 0 < _leaves.size_of(norm) <= _JOINED
    )


def _split(step: Step) -> Any:
    return _axis_names.split_axes(step.clipped, step.declared.axis_name)


def _differs(step: Step) -> bool:
    """Whether it is another one on each device."""
    return bool(_axis_names.split_axes(step.norm, step.declared.axis_name))
