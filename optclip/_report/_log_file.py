"""Read a log file: JSON lines, one number per line, or one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMATS = "Pass JSON lines, one number per line, a JSON array, or a trainer_state.json."
# The key of numbers without one.
BARE = "norm"


class LogError(ValueError):
    """Reject a log, with one line that names the place and the fix."""


class Entries(NamedTuple):
    """Hold the entries of a log, which may differ in their keys.

    Attributes:
      path: Name of the file, for errors.
      unit: `"line"` or `"entry"`, what a place counts.
      places: Place of each entry in the file.
      rows: The entries, without nulls.
      is_bare: Whether they are numbers without keys.
    """

    path: str
    unit: str
    places: list[int]
    rows: list[dict[str, Any]]
    is_bare: bool

    def at(self, place: int) -> str:
        """Return the place of an entry in words, to begin an error."""
        return f"{self.unit.capitalize()} {place} of {self.path}"

    @property
    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def column(self, key: str, index: list[int]) -> np.ndarray:
        """Return the numbers of a key in entries, all of which have it."""
        numbers = []
        for i in index:
            x = self.rows[i][key]
            if (number := _number(x)) is None:
                where = self.at(self.places[i])
                raise LogError(f"{where} has {x!r:.60} at {key!r}. Log a number.")
            numbers.append(number)
        return np.array(numbers)


def _number(x: Any) -> float | None:
    try:
        # `save` writes infinity as a string.
        return None if isinstance(x, bool) else float(x)
    except (TypeError, ValueError, OverflowError):
        return None


def read(path: str) -> Entries:
    """Return the entries of a log.

    Raises:
      LogError: It is empty, or a line is neither JSON nor a number.
      OSError: There is no such file, or it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise LogError(f"Line {line} of {path} is not UTF-8 text. {FORMATS}") from error
    if not text.strip():
        raise LogError(f"{path} is empty. {FORMATS}")
    unit, entries = "entry", _document(text, path)
    if entries is None:
        unit, entries = "line", _lines(text, path)
    if not entries:
        raise LogError(f"{path} has no entries. {FORMATS}")
    is_bare = not isinstance(next(iter(entries.values())), dict)
    log = Entries(path, unit, [*entries], [], is_bare)
    for place, entry in entries.items():
        if isinstance(entry, dict) == is_bare or (is_bare and not is_number(entry)):
            raise LogError(
                f"{log.at(place)} is {entry!r:.60}. Pass a log whose entries are all"
                " JSON objects, or all numbers."
            )
        row = {BARE: entry} if is_bare else entry
        log.rows.append({key: x for key, x in row.items() if x is not None})
    return log


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _document(text: str, path: str) -> dict[int, Any] | None:
    """Return the entries of a JSON document, or None for one entry per line."""
    first, *rest = text.strip().splitlines()
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if _value(first) is not None or not first.startswith(("[", "{")):
            return None
        raise LogError(
            f"Line {error.lineno} of {path} is not JSON: {error.msg}, column"
            f" {error.colno}. {FORMATS}"
        ) from error
    except RecursionError as error:
        raise LogError(f"{path} is not a log: {error}. {FORMATS}") from error
    has_lists = isinstance(document, dict) and any(map(_is_list, document.values()))
    if _is_list(document) or has_lists or (isinstance(document, dict) and rest):
        return dict(enumerate(_entries(document, path), 1))
    return None


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


def _entries(document: Any, path: str) -> Iterator[Any]:
    """Yield the entries of a list, of Hugging Face's state, or of a dict of lists."""
    entries = document if _is_list(document) else document.get("log_history")
    if _is_list(entries):
        yield from entries
        return
    columns = {key: x for key, x in document.items() if _is_list(x)}
    lengths = {key: len(x) for key, x in columns.items()}
    if not columns:
        raise LogError(f"{path} has neither 'log_history' nor lists. {FORMATS}")
    if len(set(lengths.values())) > 1:
        raise LogError(
            f"The lists of {path} differ in length: {lengths!s:.200}. Log each"
            " quantity in each step."
        )
    for numbers in zip(*columns.values(), strict=True):
        yield dict(zip(columns, numbers, strict=True))


def _lines(text: str, path: str) -> dict[int, Any]:
    """Return the entries of a file with one entry per line, by line."""
    lines = text.split("\n")
    entries: dict[int, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if (value := _value(line)) is not None:
            entries[number] = value
        elif entries and number == len(lines):
            # The program ended, or was still writing.
            note = f"note: line {number}, the last, is incomplete and was skipped"
            print(note, file=sys.stderr)
        else:
            raise LogError(
                f"Line {number} of {path} is neither JSON nor a number:"
                f" {line.strip()!r:.60}. {FORMATS}"
            )
    return entries


def _value(line: str) -> Any:
    """Return the JSON value or number of a line, or None if it is neither."""
    for parse in (json.loads, float):
        try:
            return parse(line)
        except (ValueError, RecursionError):
            continue
    return None
