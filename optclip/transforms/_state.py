"""Check and create the state of a transformation.

Its structure, shapes and dtypes are fixed from `init` on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _packed_state, _validate
from optclip._arrays._types import PyTree, Record, TreeDef
from optclip.scopes import Scope
from optclip.typing import ClipRecord, ClipState


def check_record(record: Record, name: object) -> None:
    """Raise unless these are a `record=` and a `name=`."""
    words = isinstance(record, str) and record == "leaves"
    if not words and not isinstance(record, bool):
        raise TypeError(_validate.must_be("record", "True, False or 'leaves'", record))
    if not isinstance(name, str) or not name:
        raise TypeError(_validate.must_be("name", "a non-empty string", name))


def check_recordable(state: Any) -> None:
    """Raise unless a transformation that needs no state can record in this one."""
    if not isinstance(state, ClipState):
        wanted = "the ClipState that init returned, None or optax.EmptyState()"
        advice = (
            "To clip without a state, call the function of the same name, such as"
            " optclip.functional.clip_by_global_norm(grads, max_norm), or build the"
            " transformation with record=False, which accepts any state."
        )
        raise TypeError(_validate.must_be("state", wanted, state, advice))


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
    advice = "Pass the state that this transformation's init or last update returned."
    if not isinstance(state, ClipState):
        raise TypeError(_validate.must_be("state", "a ClipState", state, advice))
    recorded = sorted(state.clip_record)
    if recorded != names or num_memories != len(state.clip_memory):
        raise ValueError(
            "`state` belongs to another transformation, with"
            f" {len(state.clip_memory)} memories and records for {recorded}."
            f" {advice}"
        )
    structures = [jax.tree.structure(state.clip_record[n].clip_norm) for n in recorded]
    entries = [0] * treedef.num_leaves
    wanted = jax.tree.structure(
        _packed_state.keyed(treedef, entries) if itemized else 0
    )
    if any(k != wanted for k in structures):
        raise ValueError(
            "The norms of the updates must have the structure of the state,"
            f" {structures[0]}, got {wanted}. Pass trees of one structure to init and"
            " update."
        )
    fractions = [state.clip_record[n].clip_fraction is None for n in recorded]
    if wanted.num_leaves and any(is_none != scope.itemized for is_none in fractions):
        raise ValueError(f"`state` belongs to another scope. {advice}")


def check_leaf_norms(record: ClipRecord, leaf_norms: PyTree) -> None:
    """Raise unless the record was made for such leaves."""
    expected, wanted = map(jax.tree.structure, (record.clip_leaf_norm, leaf_norms))
    if (record.clip_leaf_norm is None) != (leaf_norms is None):
        raise ValueError(
            "`state` must have been made with the same `record=`, got one"
            f" {'without' if record.clip_leaf_norm is None else 'with'} norms of"
            " leaves. Pass the state that this transformation's init or last update"
            " returned."
        )
    if expected != wanted:
        raise ValueError(
            "The updates must have the leaves of the state,"
            f" {expected}, got {wanted}. Pass trees of one structure to init and"
            " update."
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
