"""Merge the state of an optimizer into the state of a changed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays._packed_state import PerNorm
from .._arrays._types import PyTree
from .._typing import ClipState, HistoryState
from ._carried_history import carried_history


class Carrier:
    """Merge an old state into a new one.

    Args:
      names: The paths of norms by the digest in the state.
    """

    def __init__(self, names: Mapping[str, tuple[str, ...]]) -> None:
        self.names = names

    def carried(self, old: PyTree, new: PyTree) -> PyTree:
        """Return the new state with the numbers of the old one."""
        if type(old) is not type(new):
            return self._of_other_type(old, new)
        if isinstance(new, PerNorm):
            return self._per_norm(old, new)
        if isinstance(new, ClipState):
            return ClipState(
                self.carried(old.clip_step, new.clip_step),
                self._memories(old.clip_memory, new.clip_memory),
                self.carried(old.clip_record, new.clip_record),
            )
        if isinstance(new, HistoryState):
            inner = self.carried(old.history_inner, new.history_inner)
            return carried_history(old, new)._replace(history_inner=inner)
        if _is_named_tuple(new):
            return type(new)(*map(self.carried, old, new))
        if _is_chain(new):
            return self._aligned(old, new)
        if isinstance(new, dict):
            # The union keeps the type, such as the OrderedDict of a named chain.
            return new | {k: self.carried(old.get(k), x) for k, x in new.items()}
        return _by_path(old, new)

    def _of_other_type(self, old: PyTree, new: PyTree) -> PyTree:
        """Return the state of an optimizer that was wrapped, unwrapped or chained."""
        if is_array(new):
            return _array(old, new)
        if parts := _parts_of(new):
            return new._replace(inner_states=self._split(old, parts))
        if parts := _parts_of(old):
            # Counts and other single numbers are those of the largest part, the last.
            for part in sorted(parts.values(), key=_number_of_arrays):
                new = self.carried(part, new)
            return new
        if _is_chain(new):
            return self._aligned(old, new)
        if field := _inner_of(new):
            inner = self.carried(old, getattr(new, field))
            return new._replace(**{field: inner})
        if _inner_of(old) or _is_chain(old):
            return self._aligned(old, new)
        return _by_path(old, new)

    def _split(self, old: PyTree, parts: dict[Any, PyTree]) -> dict[Any, PyTree]:
        """Return the states of a partition, each with the numbers of its leaves."""
        moved, used = dict(parts), set[int]()
        for label, part in parts.items():
            carried = self.carried(old, part)
            # A count that two parts share is copied, since no donation may delete an
            # array twice.
            moved[label] = jax.tree.map(
                lambda x: jnp.copy(x) if id(x) in used else x, carried
            )
            used.update(map(id, jax.tree.leaves(moved[label])))
        return moved

    def _aligned(self, old: PyTree, new: PyTree) -> PyTree:
        """Return the states of a chain, each with the old one that is most like it."""
        states, treedef = jax.tree.flatten(new, is_leaf=_is_state)
        unused = dict(enumerate(_opened(old, set(map(type, states)))))
        types = set(map(type, unused.values()))
        pairs = [
            (-_likeness(before, state), i, j)
            for i, before in unused.items()
            for j, state in enumerate(states)
        ]
        merged: dict[int, PyTree] = {}
        for likeness, i, j in sorted(pairs):
            if not likeness or i not in unused or j in merged:
                continue
            is_wrapper = _inner_of(states[j]) or _parts_of(states[j])
            if is_wrapper and type(states[j]) not in types:
                # A new wrapper may hold several of the old states.
                merged[j] = self._of_other_type(tuple(unused.values()), states[j])
            else:
                merged[j] = self.carried(unused.pop(i), states[j])
        return treedef.unflatten([merged.get(j, x) for j, x in enumerate(states)])

    def _memories(self, old: list[PyTree], new: list[PyTree]) -> list[PyTree]:
        """Return the memories of rules; one with other shapes starts anew."""
        if isinstance(new, list):
            if not isinstance(old, list) or len(old) != len(new):
                return new
            return [self._memories(*pair) for pair in zip(old, new, strict=True)]
        return self.carried(old, new) if self._fits(old, new) else new

    def _fits(self, old: PyTree, new: PyTree) -> bool:
        """Return whether the parts of a memory with an entry per norm have one shape.

        Trees like the parameters always fit, since each leaf stands for itself.
        """
        if type(old) is not type(new):
            return False
        if isinstance(new, PerNorm):
            (a,), (b,) = old.by_digest.values(), new.by_digest.values()
            return isinstance(a, dict) == isinstance(b, dict) and (
                isinstance(a, dict) or _shapes(a, 1) == _shapes(b, 1)
            )
        if _is_named_tuple(new):
            return all(map(self._fits, old, new))
        return not is_array(new) or _shapes(old) == _shapes(new)

    def _per_norm(self, old: PerNorm, new: PerNorm) -> PerNorm:
        """Return the entries of all norms, moved by their paths."""
        ((before, a),), ((after, b),) = old.by_digest.items(), new.by_digest.items()
        if before == after:
            return PerNorm({after: self.carried(a, b)})
        place = {name: i for i, name in enumerate(self.names.get(before, ()))}
        pairs = [
            (place[name], i)
            for i, name in enumerate(self.names.get(after, ()))
            if name in place
        ]
        if isinstance(a, dict) and isinstance(b, dict):
            moved = {str(j): self.carried(a[str(i)], b[str(j)]) for i, j in pairs}
            return PerNorm({after: b | moved})
        if not pairs or _shapes(a, 1) != _shapes(b, 1):
            return new
        here, there = (jnp.array(x) for x in zip(*pairs, strict=True))

        def moved_to(x: jax.Array, y: jax.Array) -> jax.Array:
            return y.at[there].set(jnp.asarray(x)[here].astype(y.dtype))

        return PerNorm({after: jax.tree.map(moved_to, a, b)})


def _by_path(old: PyTree, new: PyTree) -> PyTree:
    """Return a tree with the old array of each path, in trees of any type."""
    by_path = {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(old)}
    return jax.tree.map_with_path(
        lambda p, x: _array(by_path.get(jax.tree_util.keystr(p)), x), new
    )


def _array(old: Any, new: Any) -> Any:
    """Return the old array if it can replace the new one."""
    if not is_array(old) or jnp.shape(old) != jnp.shape(new):
        return new
    kinds = [jnp.issubdtype(x.dtype, jnp.inexact) for x in (old, new)]
    if kinds[0] != kinds[1]:
        return new
    return old if old.dtype == new.dtype else jnp.asarray(old).astype(new.dtype)


def is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _number_of_arrays(tree: PyTree) -> int:
    return len(jax.tree.leaves(tree))


def _shapes(tree: PyTree, skipped: int = 0) -> list[tuple[int, ...]]:
    return [jnp.shape(x)[skipped:] for x in jax.tree.leaves(tree)]


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _inner_of(state: PyTree) -> str | None:
    """Return the field of a wrapper's state with the state of what it wraps."""
    fields = state._fields if _is_named_tuple(state) else ()
    return next((f for f in fields if _holds_inner(f)), None)


def _holds_inner(field: str) -> bool:
    return ("inner" in field and field != "inner_states") or field == "feedback_clip"


def _parts_of(state: PyTree) -> dict[Any, PyTree] | None:
    """Return the states by label of `optax.partition`, or None."""
    return getattr(state, "inner_states", None) if _is_named_tuple(state) else None


def _is_chain(x: Any) -> bool:
    return isinstance(x, tuple) and not _is_named_tuple(x)


def _is_state(x: Any) -> bool:
    return not _is_chain(x)


def _opened(old: PyTree, kept: set[type]) -> list[PyTree]:
    """Return the states in chains, and in wrappers of other types than `kept`."""
    opened = []
    for state in jax.tree.leaves(old, is_leaf=_is_state):
        field = _inner_of(state)
        if field and type(state) not in kept:
            opened += _opened(getattr(state, field), kept)
        else:
            opened.append(state)
    return opened


def _likeness(old: PyTree, new: PyTree) -> int:
    """Return the number of types and names that two states have in common."""
    (types, names), (new_types, new_names) = _kinds(old), _kinds(new)
    if names and new_names and not names & new_names:
        return 0
    return len(types & new_types) + len(names & new_names)


def _kinds(state: PyTree) -> tuple[set[type], set[str]]:
    """Return the types of the states in a state, and the names of transformations."""
    types, names, waiting = set(), set(), [state]
    while waiting:
        part = waiting.pop()
        if _is_named_tuple(part):
            types.add(type(part))
        if isinstance(part, ClipState):
            names.update(part.clip_record)
        elif isinstance(part, (tuple, list)):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part.values())
    return types, names
