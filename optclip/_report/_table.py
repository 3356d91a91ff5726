"""Hold the numbers of a log in little memory: one array per key."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ._errors import LogError

# The key of numbers without one.
BARE = "norm"


class Table:
    """Hold entries that may differ in their keys.

    A key whose entry is null is missing. Text and lists are rejected when their key is
    read, since logs have such entries besides numbers.

    Attributes:
      path: Name of the file, for errors.
      unit: `"line"` or `"entry"`, what a place counts.
      places: Place of each entry in the file.
    """

    def __init__(self, path: str, unit: str) -> None:
        self.path, self.unit = path, unit
        self.places = array("q")
        self._kind: type | None = None
        self._columns: dict[str, array[float]] = {}
        self._bad: dict[str, tuple[int, Any]] = {}
        # Entries have few different sets of keys, so each set is stored once.
        self._index_of: dict[tuple[str, ...], int] = {}
        self._set_of_entry = array("q")

    def add(self, place: int, entry: Any) -> None:
        """Append an entry, a dict or a number."""
        kind = dict if isinstance(entry, dict) else float
        if (kind is float and not _is_number(entry)) or self._kind not in (None, kind):
            raise LogError(
                f"{self.at(place)} is {_shown(entry)}. Pass a log whose entries are all"
                " JSON objects, or all numbers."
            )
        self._kind = kind
        items = entry if kind is dict else {BARE: entry}
        items = {key: x for key, x in items.items() if x is not None}
        keys = tuple(items)
        self._set_of_entry.append(self._index_of.setdefault(keys, len(self._index_of)))
        self.places.append(place)
        for key, x in items.items():
            self._append(key, place, x)

    def _append(self, key: str, place: int, x: Any) -> None:
        try:
            # `save` writes infinity as a string.
            number = float("." if isinstance(x, bool) else x)
        except (TypeError, ValueError, OverflowError):
            self._bad.setdefault(key, (place, x))
            number = np.nan
        self._columns.setdefault(key, array("d")).append(number)

    @property
    def is_bare(self) -> bool:
        """Whether the entries are numbers without keys."""
        return self._kind is float

    @property
    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(self._columns)

    @property
    def numeric_keys(self) -> list[str]:
        """The keys whose entries are all numbers."""
        return [key for key in self._columns if key not in self._bad]

    def at(self, place: int) -> str:
        """Return the place of an entry in words, to begin an error."""
        return f"{self.unit.capitalize()} {place} of {self.path}"

    def entries_with(self, keys: set[str]) -> np.ndarray:
        """Return the indices of the entries that have any of these keys."""
        has_any = np.array([not keys.isdisjoint(each) for each in self._index_of])
        return np.flatnonzero(has_any[np.asarray(self._set_of_entry)])

    def check_same(self, keys: set[str], entries: np.ndarray) -> None:
        """Raise an error unless these entries have the same of these keys."""
        sets = [keys.intersection(each) for each in self._index_of]
        index = np.asarray(self._set_of_entry)[entries]
        first = sets[index[0]]
        is_odd = np.array([each != first for each in sets])[index]
        if not is_odd.any():
            return
        at = int(np.argmax(is_odd))
        odd, this = sorted(first ^ sets[index[at]])[0], int(entries[at])
        places = self.places[int(entries[0])], self.places[this]
        has, lacks = places if odd in first else places[::-1]
        raise LogError(
            f"{self.at(places[1])} differs in its keys: {self.unit} {has} has {odd!r},"
            f" {self.unit} {lacks} does not. Log the same keys in each step."
        )

    def column(self, key: str, entries: np.ndarray) -> np.ndarray:
        """Return the numbers of a key in entries, all of which have it."""
        if key in self._bad:
            place, x = self._bad[key]
            raise LogError(
                f"{self.at(place)} has {_shown(x)} at {key!r}. Log a number."
            )
        with_key = self.entries_with({key})
        return np.array(self._columns[key])[np.searchsorted(with_key, entries)]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shown(x: Any) -> str:
    return f"{x!r:.60}"
