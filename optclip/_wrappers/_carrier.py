"""Move arrays from the addresses of one state to the same addresses of another."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._arrays import _leaves
from .._monitor import columns_in, listed
from .._typing import ClipState, HistoryState, SkipState
from ._addresses import LOSS, Group, Leaf, Owner, Slots, State

_OURS = (ClipState, SkipState, HistoryState)

# An entry of an array: its position, and its row or None.
Entry = tuple[int, int | None]


class Carrier:
    """Fill a new state with the arrays of an old one that have the same addresses.

    Args:
      before: The old states.
      old: Their arrays.
      like: Their shapes and dtypes as `init` returns them.
      after: The new states.
      new: Their arrays, as `init` returned them.
      leaves: The leaves of the old and of the new parameters.
    """

    def __init__(
        self,
        before: list[State],
        old: list[Any],
        like: list[Any],
        after: list[State],
        new: list[Any],
        leaves: list[list[Leaf]],
    ) -> None:
        self.before, self.old, self.after, self.new = before, old, after, list(new)
        self.like, self.leaves = like, leaves
        # Nothing is lost with the arrays of leaves that are gone.
        self.gone = {x for x, _ in leaves[0]} - {x for x, _ in leaves[1]}
        self.entries = Counter(
            i
            for state in after
            for slots in state.groups.values()
            for i, _ in slots.values()
        )
        # The old entry for each row of a new array.
        self.moves: dict[int, dict[int | None, Entry]] = {}
        # Owners whose arrays moved, those that a note names, and why others did not.
        self.moved, self.noted = set[tuple[State, Group]](), set[tuple[State, Group]]()
        self.reasons: dict[tuple[State, Group], str] = {}
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
            if sources:
                self._carry_history(sources[0], state)
            return
        if state.kind[0] is optax.ScaleByScheduleState and not sources:
            self._note_new_schedule(state)
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
        fresh = [
            owner
            for (what, owner), old in origins.items()
            if owner and len(owner) == 1 and not (what or old)
        ]
        if counts and fresh:
            self._note_count(state, fresh)

    def _sources(self, state: State) -> list[State]:
        """Return the old states that go on in a new one, that of most elements first.

        There are several if labels were joined.
        """
        sizes = Counter[State]()
        for leaf in state.leaves:
            olds, news = (
                tuple(x for x in states if x.kind == state.kind and leaf in x.leaves)
                for states in (self.before, self.after)
            )
            for old in self._matched(state, olds, news):
                sizes[old] += math.prod(leaf[1])
        return [old for old, _ in sizes.most_common()]

    def _matched(
        self, state: State, olds: tuple[State, ...], news: tuple[State, ...]
    ) -> tuple[State, ...]:
        """Return the old state, of those that have a leaf, that goes on in a new one.

        They are matched by the labels around them and by what they measure, where this
        occurs once on both sides; the others by order. Counts of labels without arrays
        of leaves may all go on.
        """
        for field in "labels", "measured":
            key = operator.attrgetter(field)
            here, there = (Counter(map(key, states)) for states in (news, olds))
            clear = {x for x in here if here[x] == there[x] == 1} - {""}
            if key(state) in clear:
                return tuple(old for old in olds if key(old) == key(state))
            if clear and field == "labels":
                return ()  # Beside a label that stays, another label is a new state.
            olds, news = (
                tuple(x for x in states if key(x) not in clear)
                for states in (olds, news)
            )
        # In a dict, such as the state of a named chain, the order has no meaning.
        are_ordered = all(len({x.labels for x in xs}) == 1 for xs in (olds, news))
        if len(olds) == len(news) and are_ordered:
            return (olds[news.index(state)],)
        if not olds or not any(owner for x in (*olds, *news) for _, owner in x.groups):
            return olds
        raise ValueError(
            f"`state` has {len(olds)} of {state} for the same leaves, and `new_tx` has"
            f" {len(news)}, and it is unclear which continues where. Give those of"
            " optclip a `name=` of their own in `tx` and `new_tx`, and pass"
            " jax.tree.unflatten(jax.tree.structure(tx.init(params)),"
            " jax.tree.leaves(state)) as `state`. States of optax need labels, as those"
            " of optax.named_chain, whose state is dict(zip(labels, state))."
        )

    def _carry_owned(
        self, state: State, sources: list[State], group: Group, slots: Slots
    ) -> State | None:
        """Move the arrays of a leaf or the memory of a norm; return where it was."""
        what, owner = group[0], group[1] or LOSS
        old = next((old for old in sources if group in old.groups), None)
        if old is not None:
            return old if self._move(old, group, slots) else None
        overlaps = [
            (_size(owner & other) / max(1, _size(owner | other)), old, other)
            for old in sources
            for of_old, other in old.groups
            if what and of_old == what and other and owner & other
        ]
        if not overlaps:
            return None
        overlap, old, other = max(overlaps, key=operator.itemgetter(0))
        change = (
            f"below its norm are {len(owner - other)} more and {len(other - owner)}"
            " fewer leaves"
        )
        place = old, (what, other)
        if overlap >= 0.5 and place not in self.moved and self._move(*place, slots):
            self.notes.append(f"the memory of {state} continues; {change}")
            return old
        self.noted.add(place)
        why = "the old one continues in another norm"
        if overlap < 0.5:
            why = f"{change}, and the others have less than half of the elements"
        self.notes.append(
            f"the memory of {state} for {_names([owner])} restarts: {why}"
        )
        return None

    def _move(self, old: State, group: Group, slots: Slots) -> bool:
        """Move all arrays of an owner, or none; return whether."""
        there = old.groups[group]
        if there.keys() != slots.keys() or not all(
            self._fits(there[role], slots[role]) for role in slots
        ):
            why = "`new_tx` has it with another shape, window or dtype"
            self.reasons[old, group] = why
            return False
        self.moved.add((old, group))
        for role, entry in slots.items():
            self._put(there[role], entry)
        return True

    def _carry_shared(
        self, state: State, sources: list[State], what: Hashable, slots: Slots
    ) -> bool:
        """Move arrays without an owner, such as a count; return whether one counts."""
        counts = False
        for role, entry in slots.items():
            here = [old.groups.get((what, None), {}).get(role) for old in sources]
            there = [old for old in here if old and self._fits(old, entry)]
            if not there:
                continue
            first, *others = (self.old[i] for i, _ in there)
            are_equal = all(
                x is first or np.array_equal(_readable(first), _readable(x))
                for x in others
            )
            if state.kind[0] not in _OURS and not are_equal:
                note = f"{role[-1]} of {state} differs between the joined states"
                self.notes.append(f"{note}: that with most elements continues")
            self._put(there[0], entry)
            self.moved.update((old, (what, None)) for old in sources)
            counts |= not _leaves.is_floating(first) and bool(np.any(_readable(first)))
        return counts

    def _note_count(self, state: State, fresh: list[Owner]) -> None:
        """Note that a count goes on beside arrays of new leaves."""
        note = f"the count of {state} continues beside new arrays of {_names(fresh)}"
        fields = {"".join(r[:1]) for slots in state.groups.values() for r in slots}
        if fields >= {"mu", "nu"}:
            # The largest ratio of the bias corrections, in about the twelfth step.
            note += (
                ", whose first updates are up to 2.1 times the learning rate after 100"
                " steps, and 6.6 times after 5000 (b1=0.9, b2=0.999). Give new"
                " leaves a label of their own in optax.partition"
            )
        self.notes.append(note)

    def _note_new_schedule(self, state: State) -> None:
        """Note that a schedule for old leaves starts at 0."""
        counts = (
            int(_readable(x))
            for x in self.old
            if not jnp.ndim(x) and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        )
        steps = max(counts, default=0)
        if steps and not state.leaves.isdisjoint(self.leaves[0]):
            self.notes.append(
                f"the count of {state} starts at 0 after {steps} steps, and its"
                " schedule with it. To continue, shift the schedule by them"
            )

    def _carry_history(self, old: State, state: State) -> None:
        """Move the rows of a history by the names of their columns."""
        there, here = (
            [i for i, _ in x.groups[None, None].values()] for x in (old, state)
        )
        old_rows, count, old_names = arrays = [self._once(i) for i in there]
        blank, _, names = (self.new[i] for i in here)
        if old_rows.shape != blank.shape or not np.array_equal(old_names, names):
            rows = _carried_rows(old_rows, count, old_names, blank, names)
            arrays[::2] = rows, names
        for i, x in zip(here, arrays, strict=True):
            self.new[i] = _placed(x, old_rows)

    def _fits(self, old: Entry, new: Entry) -> bool:
        arrays = self.old[old[0]], self.new[new[0]]
        shapes = [
            jnp.shape(x)[row is not None :]
            for x, (_, row) in zip(arrays, (old, new), strict=True)
        ]
        kinds = [*map(_kind, (self.like[old[0]], arrays[1]))]
        return shapes[0] == shapes[1] and kinds[0] == kinds[1]

    def _put(self, old: Entry, new: Entry) -> None:
        self.moves.setdefault(new[0], {})[new[1]] = old

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
        return self._once(at)

    def _once(self, index: int) -> Any:
        """Return an old array, or a copy of it from the second time on."""
        old = self.old[index]
        if index in self.returned and isinstance(old, jax.Array):
            # A donation must not delete an array twice.
            return jax.device_put(old, old.sharding, may_alias=False)
        self.returned.add(index)
        return old

    def _beside(self, new: Any) -> Any:
        """Return a new array in the memory space of the old ones.

        Moments may be in host memory and counts on the device.
        """
        like = self.shardings[jnp.ndim(new) > 0] or self.shardings[jnp.ndim(new) == 0]
        kinds = [*{sharding.memory_kind for sharding in like}]
        is_ours = isinstance(new, jax.Array) and len(kinds) == 1
        if not is_ours or new.sharding.memory_kind in kinds:
            return new
        # On one device, it would be committed there, and the others are on a mesh.
        is_single = isinstance(new.sharding, jax.sharding.SingleDeviceSharding)
        sharding = _whole(like[0]) if is_single else new.sharding
        return jax.device_put(new, sharding.with_memory_kind(kinds[0] or ""))

    def lines(self) -> list[str]:
        """Return what the new state lacks of the old one, and why."""
        lines: dict[tuple[str, str], list[Owner]] = {}
        for state in self.before:
            for (what, owner), slots in state.groups.items():
                place = state, (what, owner)
                if (
                    place in self.moved
                    or place in self.noted
                    or not self._matters(*place)
                ):
                    continue
                fields = ", ".join(dict.fromkeys("".join(role[:1]) for role in slots))
                name = f"{'memory' if what else fields or 'arrays'} of {state}"
                reason = self.reasons.get(place) or self._reason(state, what, owner)
                lines.setdefault((name, reason), []).append(owner or LOSS)
        texts = [
            f"{name}{_names(owners, ' for ')}: {reason}"
            for (name, reason), owners in lines.items()
        ]
        if self.leaves[0] and not {*self.leaves[0]} & {*self.leaves[1]}:
            texts.append("no leaf of `params` is in `new_params`, by path and shape")
        return [*texts, *dict.fromkeys(self.notes)]

    def _matters(self, state: State, group: Group) -> bool:
        """Return whether a kept leaf or a memory loses numbers other than 0."""
        arrays = [self.old[i] for i, _ in state.groups[group].values()]
        is_learned = state.kind[0] not in _OURS and (
            state.kind[0] is None
            or any(jnp.ndim(x) and _leaves.is_floating(x) for x in arrays)
        )
        if not (is_learned or group[1]):
            return False  # A count or a record that the new optimizer does not have.
        if group[1] and self.gone.issuperset(path for path, _ in group[1]):
            return False
        return any(
            np.any(_readable(self.old[i])[... if row is None else row])
            for i, row in state.groups[group].values()
        )

    def _reason(self, state: State, what: Hashable, owner: Owner | None) -> str:
        """Return why nothing took the arrays of an owner."""
        if state.kind[0] is None:
            return "without a named tuple, its place in the chain must stay the same"
        if not any(x.kind[:2] == state.kind[:2] for x in self.after):
            return "`new_tx` has no such state"
        owner = owner or LOSS
        if owner != LOSS and owner.isdisjoint(self.leaves[1]):
            return "the leaf has another shape"
        if what is None and len(owner) > 1:
            return "it is one array for all leaves"
        if what is None:
            return "`new_tx` has no such state for this leaf"
        return "`new_tx` has no memory of this name, norm, scope and rule for them"


def _carried_rows(
    before: Any, count: Any, old_names: Any, blank: Any, names: Any
) -> np.ndarray:
    """Return the rows of a new history with the newest ones of the old.

    Columns are matched by name. Those that the old history lacks stay 0 in its rows.
    """
    before, rows, number = np.asarray(before), np.array(blank), round(float(count))
    steps = np.arange(max(0, number - min(len(before), len(rows))), number)
    columns, new_columns = (
        {column.key: i for i, column in enumerate(columns_in(jax.device_get(text)))}
        for text in (old_names, names)
    )
    pairs = [(columns[n], j) for n, j in new_columns.items() if n in columns]
    if len(steps) and pairs:
        here, there = (np.array(x) for x in zip(*pairs, strict=True))
        kept = before[steps % len(before)][:, here]
        rows[(steps % len(rows))[:, None], there[None]] = kept
    return rows


def _kind(x: Any) -> Any:
    """Return the dtype of a PRNG key, and for numbers whether they are floating."""
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return x.dtype if is_key else _leaves.is_floating(x)


def _size(leaves: Owner) -> int:
    return sum(math.prod(shape) for _, shape in leaves)


def _names(owners: list[Owner], before: str = "") -> str:
    """Return the paths of the first leaves, and the number of others."""
    leaves = (x for owner in owners for x in sorted(owner - LOSS))
    paths = ["/".join(path) or "the array" for path, _ in dict.fromkeys(leaves)]
    return before + listed(paths) if paths else ""


def _readable(x: Any) -> Any:
    """Return an array in NumPy; ones for a key, or for an array of other processes."""
    is_array = isinstance(x, jax.Array)
    is_key = is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    is_here = not is_array or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x) if is_here and not is_key else np.ones(jnp.shape(x))


def _placed(x: Any, like: Any) -> Any:
    """Return an array in the memory and on the devices of another one."""
    if isinstance(x, jax.Array) or not isinstance(like, jax.Array):
        return jnp.asarray(x)
    is_alike = np.shape(x) == like.shape
    return jax.device_put(x, like.sharding if is_alike else _whole(like.sharding))


def _whole(sharding: Any) -> Any:
    """Return a sharding that is not split, on the same devices in the same memory."""
    if not isinstance(sharding, jax.NamedSharding):
        return sharding
    return jax.NamedSharding(sharding.mesh, jax.P(), memory_kind=sharding.memory_kind)
