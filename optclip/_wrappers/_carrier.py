"""Move arrays from the addresses of one state to the same addresses of another."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves
from .._typing import ClipState, HistoryState, SkipState
from ._addresses import LOSS, Leaf, Owner, Slots, State
from ._carried_history import FIELDS as HISTORY
from ._carried_history import carried_history

# An entry of an array: its position, and its row or None.
Entry = tuple[int, int | None]


class Carrier:
    """Fill a new state with the arrays of an old one that have the same addresses.

    Args:
      before: The old states.
      old: Their arrays.
      after: The new states.
      new: Their arrays, as `init` returned them.
      leaves: The leaves of the old and of the new parameters.
    """

    def __init__(
        self,
        before: list[State],
        old: list[Any],
        after: list[State],
        new: list[Any],
        leaves: list[list[Leaf]],
    ) -> None:
        self.before, self.old, self.after, self.new = before, old, after, list(new)
        self.leaves = leaves
        # What it says of other leaves does not matter, since these are gone.
        self.kept = {path for path, _ in (*leaves[1], *LOSS)}
        self.entries = Counter(i for state in after for i, _ in _entries(state))
        self.used = set[Entry]()
        # The old entry for each row of a new array.
        self.moves: dict[int, dict[int | None, Entry]] = {}
        # Why an entry of the old state is not in the result.
        self.reasons: dict[Entry, str] = {}
        self.notes: list[str] = []
        self.returned = set[int]()
        arrays = [x for x in old if isinstance(x, jax.Array)]
        self.shardings = [
            [x.sharding for x in arrays if bool(x.ndim) == has_axes]
            for has_axes in (False, True)
        ]

    def carried(self) -> list[Any]:
        """Return the arrays of the new state with the numbers of the old one."""
        for state in self.after:
            self._carry(state)
        return [self._array(i, x) for i, x in enumerate(self.new)]

    def _carry(self, state: State) -> None:
        sources = self._sources(state)
        if state.kind[0] is HistoryState:
            self._carry_history(sources, state)
            return
        # Where each owner has its arrays from, or None.
        origins = {
            group: self._carry_owned(state, sources, group, slots)
            for group, slots in state.groups.items()
            if group[1] is not None
        }
        counts = False
        for (what, owner), slots in state.groups.items():
            if owner is None:
                # A count moves with what it counts; without that, by its role.
                givers = {old for (w, _), old in origins.items() if w == what}
                here = [old for old in sources if old in givers or not givers]
                counts |= self._carry_shared(state, here, what, slots)
        fresh = [x for (w, x), old in origins.items() if x and not (w or old)]
        if counts and fresh:
            self._note_count(state, fresh)

    def _sources(self, state: State) -> list[State]:
        """Return the old states that go on in a new one, that of most elements first.

        There are several if labels were joined. States that have a leaf in common are
        matched by order if their number is the same, otherwise by the states and labels
        around them.
        """
        olds, news = (
            [x for x in states if x.kind == state.kind and x.leaves & state.leaves]
            for states in (self.before, self.after)
        )
        if _are_apart(olds) and _are_apart(news):
            return sorted(olds, key=lambda old: -_size(old.leaves & state.leaves))
        if len(olds) != len(news):
            contexts = [Counter(x.context for x in states) for states in (olds, news)]
            clear = {c for c in contexts[0] if contexts[0][c] == contexts[1][c] == 1}
            if state.context in clear:
                return [old for old in olds if old.context == state.context]
            olds, news = (
                [x for x in states if x.context not in clear] for states in (olds, news)
            )
        if not olds or len(olds) == len(news):
            return olds and [olds[news.index(state)]]
        values = [[self.old[i] for i, _ in _entries(old)] for old in olds]
        if all(all(map(_equal, values[0], x)) for x in values) and not any(
            owner for x in olds for _, owner in x.groups
        ):
            return olds[:1]
        raise ValueError(
            f"`state` has {len(olds)} of {state} for the same leaves, and `new_tx` has"
            f" {len(news)}, so that it is unknown which goes on. Give each a `name=` of"
            " its own, or a label of optax.named_chain, in `tx` and `new_tx`; then pass"
            " jax.tree.unflatten(jax.tree.structure(tx.init(params)),"
            " jax.tree.leaves(state)) as `state`."
        )

    def _carry_owned(
        self, state: State, sources: list[State], group: Any, slots: Slots
    ) -> State | None:
        """Move the arrays of a leaf or the memory of a norm; return where it was."""
        what, owner = group
        old = next((old for old in sources if group in old.groups), None)
        if old is not None:
            return old if self._move(old.groups[group], slots) else None
        if what is None or owner == LOSS:
            return None
        overlaps = [
            (_size(owner & other) / max(1, _size(owner | other)), i, other)
            for i, old in enumerate(sources)
            for w, other in old.groups
            if w == what and other and owner & other
        ]
        if not overlaps:
            return None
        overlap, i, other = max(overlaps, key=lambda x: x[0])
        there = sources[i].groups[what, other]
        change = (
            f"its norm covers {len(owner - other)} more leaves than before, and"
            f" {len(other - owner)} fewer"
        )
        if overlap < 0.5:
            self._refuse(there, f"{change}, which hold most of the elements")
        elif self._move(there, slots):
            self.notes.append(f"the memory of {state} goes on, although {change}")
            return sources[i]
        return None

    def _move(self, there: Slots, slots: Slots) -> bool:
        """Move all arrays of an owner, or none; return whether."""
        if there.keys() != slots.keys() or not all(
            self._fits(there[role], slots[role]) for role in slots
        ):
            return self._refuse(there, "another shape, window or kind of number")
        if any(entry in self.used for entry in there.values()):
            return self._refuse(there, "another part of `new_tx` took it")
        for role, entry in slots.items():
            self._put(there[role], entry)
        return True

    def _carry_shared(
        self, state: State, sources: list[State], what: Any, slots: Slots
    ) -> bool:
        """Move arrays without an owner, such as a count; return whether one counts."""
        counts = False
        for role, entry in slots.items():
            here = [old.groups.get((what, None), {}).get(role) for old in sources]
            there = [old for old in here if old is not None]
            if not there:
                continue
            if not self._fits(there[0], entry):
                self._refuse({role: there[0]}, "another shape or kind of number")
                continue
            first, *others = (self.old[i] for i, _ in there)
            is_record = state.kind[0] in (ClipState, SkipState)
            if not is_record and not all(_equal(first, x) for x in others):
                note = f"{role[-1]} of {state} is that of most elements: it differs"
                self.notes.append(f"{note} between the states that are joined")
            self.used.update(there)
            self._put(there[0], entry)
            counts |= not _leaves.is_floating(first) and bool(np.any(_readable(first)))
        return counts

    def _note_count(self, state: State, fresh: list[Owner]) -> None:
        """Note that a count goes on beside arrays of new leaves."""
        note = f"the count of {state} goes on beside new arrays of {_names(fresh)}"
        if any(role[0] == "nu" for slots in state.groups.values() for role in slots):
            note += (
                ", whose first updates are up to 6.6 times the learning rate (b1=0.9,"
                " b2=0.999). Give new leaves a label of their own in optax.partition"
            )
        self.notes.append(note)

    def _carry_history(self, sources: list[State], state: State) -> None:
        """Move the rows of a history by the names of their columns."""
        for old in sources[:1]:
            here, there = (
                [x.groups[None, None][f,][0] for f in HISTORY] for x in (state, old)
            )
            arrays = [self.old[i] for i in there], [self.new[i] for i in here]
            for i, x in zip(here, carried_history(*arrays), strict=True):
                self.new[i] = _placed(x, arrays[0][0])

    def _fits(self, old: Entry, new: Entry) -> bool:
        arrays = self.old[old[0]], self.new[new[0]]
        shapes = [
            jnp.shape(x)[row is not None :]
            for x, (_, row) in zip(arrays, (old, new), strict=True)
        ]
        kinds = [*map(_leaves.is_floating, arrays)]
        return shapes[0] == shapes[1] and kinds[0] == kinds[1]

    def _put(self, old: Entry, new: Entry) -> None:
        self.used.add(old)
        self.moves.setdefault(new[0], {})[new[1]] = old

    def _refuse(self, there: Slots, reason: str) -> bool:
        self.reasons.update(dict.fromkeys(there.values(), reason))
        return False

    def _array(self, index: int, new: Any) -> Any:
        """Return an array of the new state with the entries that moved to it."""
        moves = self.moves.get(index)
        if moves is None:
            return self._beside(new)
        at = next(iter(moves.values()))[0]
        old = self.old[at]
        is_whole = all(entry == (at, row) for row, entry in moves.items())
        is_whole = is_whole and len(moves) == self.entries[index]
        types = [(jnp.shape(x), jnp.result_type(x)) for x in (old, new)]
        if not is_whole or types[0] != types[1]:
            rows = np.array(new)
            for row, (i, old_row) in moves.items():
                place, old_place = (... if r is None else r for r in (row, old_row))
                rows[place] = np.asarray(self.old[i])[old_place]
            return _placed(rows, old)
        if at in self.returned and isinstance(old, jax.Array):
            # A donation must not delete an array twice.
            return jax.device_put(old, old.sharding, may_alias=False)
        self.returned.add(at)
        return old

    def _beside(self, new: Any) -> Any:
        """Return a new array in the memory space of the old ones.

        Moments may be in host memory and counts on the device.
        """
        like = self.shardings[bool(jnp.ndim(new))]
        kinds = [*{sharding.memory_kind for sharding in like}]
        is_ours = isinstance(new, jax.Array) and len(kinds) == 1
        if not is_ours or new.sharding.memory_kind in kinds:
            return new
        is_whole = new.sharding.is_fully_replicated and like[0].is_fully_replicated
        sharding = like[0] if is_whole else new.sharding
        return jax.device_put(new, sharding.with_memory_kind(kinds[0] or ""))

    def lines(self) -> list[str]:
        """Return what the new state lacks of the old one, and why."""
        lines: dict[tuple[str, str], list[Owner]] = {}
        for state in self.before:
            for (what, owner), slots in state.groups.items():
                lost = {
                    r: e for r, e in slots.items() if self._is_lost(what, owner, r, e)
                }
                if not lost:
                    continue
                fields = dict.fromkeys(role[0] for role in lost)
                name = (
                    f"memory of {state}" if what else f"{', '.join(fields)} of {state}"
                )
                reason = self.reasons.get(next(iter(lost.values())))
                reason = reason or self._reason(state, what, owner)
                lines.setdefault((name, reason), []).append(owner or LOSS)
        texts = [
            f"{name}{_names(owners, ' for ')}: {reason}"
            for (name, reason), owners in lines.items()
        ]
        return [*texts, *dict.fromkeys(self.notes)]

    def _is_lost(self, what: Any, owner: Owner | None, role: Any, entry: Entry) -> bool:
        """Return whether an entry of a kept leaf, or of a memory, did not move."""
        is_record = any(word in role[0] for word in ("_record", "history_"))
        if entry in self.used or is_record:
            return False
        x = self.old[entry[0]]
        if owner is None and entry not in self.reasons:
            return False  # A count that the new optimizer does not have.
        if owner and self.kept.isdisjoint(path for path, _ in owner):
            return False
        return bool(np.any(_readable(x)[... if entry[1] is None else entry[1]]))

    def _reason(self, state: State, what: Any, owner: Owner | None) -> str:
        """Return why nothing took the arrays of an owner."""
        alike = [x for x in self.after if x.kind[:2] == state.kind[:2]]
        if not alike:
            return "`new_tx` has no such state"
        if owner and owner != LOSS and owner.isdisjoint(self.leaves[1]):
            return "the leaf has another shape"
        if not what and owner and len(owner) > 1:
            return "it is one array for all leaves, which changed"
        if what:
            return "`new_tx` has no memory of the same name, norm, scope and rule"
        return "its label has no such state in `new_tx`"


def _are_apart(states: list[State]) -> bool:
    """Return whether no two states have a leaf in common."""
    return sum(len(x.leaves) for x in states) == len(
        frozenset().union(*(x.leaves for x in states))
    )


def _entries(state: State) -> list[Entry]:
    return [entry for slots in state.groups.values() for entry in slots.values()]


def _size(leaves: Owner) -> int:
    return sum(math.prod(shape) for _, shape in leaves)


def _names(owners: list[Owner], before: str = "") -> str:
    """Return the paths of the first leaves, and the number of others."""
    paths = ["/".join(path) for owner in owners for path, _ in sorted(owner - LOSS)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return before + ", ".join(paths[:3]) + more if paths else ""


def _readable(x: Any) -> Any:
    """Return an array in NumPy; ones for a key, or for an array of other processes."""
    is_array = isinstance(x, jax.Array)
    is_key = is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    is_here = not is_array or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x) if is_here and not is_key else np.ones(jnp.shape(x))


def _equal(a: Any, b: Any) -> bool:
    return a is b or np.array_equal(_readable(a), _readable(b))


def _placed(x: Any, like: Any) -> Any:
    """Return an array in the memory and on the devices of another one."""
    if isinstance(x, jax.Array) or not isinstance(like, jax.Array):
        return jnp.asarray(x)
    is_alike = np.shape(x) == like.shape or like.sharding.is_fully_replicated
    return jax.device_put(x, like.sharding) if is_alike else jnp.asarray(x)
