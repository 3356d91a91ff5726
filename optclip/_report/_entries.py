"""Read the entries of a log from a file or a pipe."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import numpy as np

from .._monitor import number_of
from ._formats import FORMATS

_HELP = (
    "Pass JSON lines, printed dicts, CSV with a header of different names, one number"
    " per line, a JSON array, or a trainer_state.json."
)
# NaN is a number and a norm. No float holds a larger count.
_RANGES = {
    "number": (-np.inf, np.inf), "norm": (0, np.inf), "count": (-(2**53), 2**53)
}  # fmt: skip


class LogError(ValueError):
    """Reject a log, with one line that names the place and the fix."""


class Entries(NamedTuple):
    """Hold the entries of a log, which may differ in their keys.

    Attributes:
      path: Name of the file, for errors.
      unit: `"line"` or `"entry"`, what a place counts.
      entries: The place in the file and the numbers of each, without nulls.
      notes: What was not read.
    """

    path: str
    unit: str
    entries: list[tuple[int, dict[str, Any]]]
    notes: list[str]

    def at(self, place: int) -> str:
        """Return the place of an entry in words, to begin an error."""
        return f"{self.unit.capitalize()} {place} of {self.path}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The entries without their places."""
        return [row for _, row in self.entries]

    @property
    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def having(self, keys: Iterable[str | None]) -> Entries:
        """Return the entries that have one of the keys."""
        kept = [each for each in self.entries if not each[1].keys().isdisjoint(keys)]
        return self._replace(entries=kept)

    def merged(self, step: str, read: Set[str | None]) -> Entries:
        """Return the entries, as one those of a step of which each holds a part.

        If a key in `read` repeats, the run has returned to that step.
        """
        entries, latest = [], {}
        for place, row in self.entries:
            at = number_of(row.get(step))
            if at is None or at not in latest or row.keys() & latest[at].keys() & read:
                latest[at] = {}
                entries.append((place, latest[at]))
            latest[at] |= row
        return self._replace(entries=entries)

    def numbers(self, key: str) -> np.ndarray:
        """Return the numbers of a key, NaN where there is none."""
        return np.array([number_of(row.get(key)) for row in self.rows], float)

    def column(self, key: str, kind: str) -> np.ndarray:
        """Return the numbers of a key in all entries; `kind` is one of `_RANGES`."""
        low, high = _RANGES[kind]
        for place, row in self.entries:
            x = row.get(key)
            number = number_of(x)
            if number is None or number < low or not (number <= high or high == np.inf):
                has = f"has {x!r:.60} at '{key}'. Log one {kind} per step"
                if x is None:
                    has = f"has no '{key}'. Log the same keys in each step"
                elif kind == "norm":
                    has += ", or pass its key with --norm"
                raise LogError(f"{self.at(place)} {has}.")
        return self.numbers(key)


def printable(text: str) -> str:
    """Return a name with escapes for what no terminal and no font can show."""
    return "".join(
        x if x.isprintable() else x.encode("unicode_escape").decode() for x in text
    )


def read(path: str) -> Entries:
    """Return the entries of a log, in the first format that fits.

    Args:
      path: Path of a file or a pipe; `"-"` for the standard input.

    Raises:
      LogError: It is empty or damaged, or has no known format.
      OSError: There is no such file, or it cannot be read.
    """
    name = "standard input" if path == "-" else printable(path)
    text = _text(path)
    if not text.strip():
        raise LogError(f"{name} is empty or damaged. {_HELP}")
    parsed = next(filter(None, (parse(text) for parse in FORMATS)), None)
    if parsed is None:
        raise _unreadable(text, name)
    if not parsed.entries:
        raise LogError(f"{name} has no entries. {_HELP}")
    log = Entries(name, parsed.unit, [], [])
    for place, entry in parsed.entries:
        if not isinstance(entry, dict) and number_of(entry) is None:
            raise LogError(
                f"{log.at(place)} is {entry!r:.60}. Pass objects or numbers."
            )
        row = entry if isinstance(entry, dict) else {"norm": entry}
        row = {printable(k): x for k, x in _flat(row).items() if x is not None}
        log.entries.append((place, row))
    last = text.count("\n") + 1
    if not isinstance(parsed.entries[0][1], dict) and {*parsed.skipped} - {last}:
        raise _unreadable(text, name, parsed.skipped[0])
    if parsed.skipped == [last]:
        # The program ended, or was still writing.
        log.notes.append(f"line {last}, the last, is incomplete and was skipped")
    elif parsed.skipped:
        count = last - text.endswith("\n")
        places = f"{len(parsed.skipped)} of {count} lines, such as {parsed.skipped[0]},"
        log.notes.append(f"{places} have no entry and were skipped")
    elif parsed.may_be_cut and not text.endswith(("\n", '"')):
        log.notes.append(f"line {last}, the last, does not end and may be incomplete")
    return log


def _flat(entry: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Return the numbers of nested dicts, with a slash between their keys."""
    flat = {}
    for key, x in entry.items():
        name = f"{folder}{key}"
        flat |= _flat(x, f"{name}/") if isinstance(x, dict) else {name: x}
    return flat


def _text(path: str) -> str:
    """Return the text of a file, unzipped, with U+FFFD for damaged characters."""
    is_pipe = path == "-"
    with open(0 if is_pipe else path, "rb", closefd=not is_pipe) as stream:
        data = stream.read()
    if data.startswith(b"\x1f\x8b"):
        data = _unzipped(data)
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_wide else "utf-8-sig", "replace")


def _unzipped(data: bytes) -> bytes:
    """Return the content of a gzip file, as far as it was written."""
    chunks = []
    damage = EOFError, gzip.BadGzipFile, zlib.error
    with contextlib.suppress(*damage), gzip.open(io.BytesIO(data)) as stream:
        while chunk := stream.read1():
            chunks.append(chunk)
    return b"".join(chunks)


def _unreadable(text: str, name: str, place: int = 1) -> LogError:
    """Return the error for a line; by default the first that is not JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        place = max(place, getattr(error, "lineno", place))
    line = text.split("\n")[place - 1].strip()
    return LogError(
        f"Line {place} of {name} has no known format: {line!r:.60}. {_HELP}"
    )
