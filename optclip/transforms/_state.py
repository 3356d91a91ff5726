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


def check_leaf_norms(record: ClipRecord, leaf_norms: PyTree) -> None:
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
    declared = (("They lack", old - new), ("They have the unknown", new - old))
    differences = [f" {verb} {sorted(names)[:5]}." for verb, names in declared if names]
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
