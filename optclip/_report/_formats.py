"""Parse the text of a log, with one function per format."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from .._monitor import number_of

# The columns of TensorBoard's downloads.
_TENSORBOARD = "Wall time", "Step", "Value"
_DICT = re.compile(r"\{[^{}]*\}")
# A key and a number, also as text or inside a call, such as tensor(1.5, device='cuda').
_PAIR = re.compile(r"""['"]([^'"]+)['"]\s*:\s*(?:[\w.]*\()?['"]?([-+\w.]+)""")


class Parsed(NamedTuple):
    """Hold the entries of a log.

    Attributes:
      unit: `"line"` or `"entry"`, what a place counts.
      entries: Each entry, after its place.
      skipped: Places without an entry.
      may_be_cut: Whether the last entry may be only a part of a number.
    """

    unit: str
    entries: list[tuple[int, Any]]
    skipped: list[int]
    may_be_cut: bool


def document(text: str) -> Parsed | None:
    """Parse a JSON array, Hugging Face's trainer_state.json, or TensorBoard's JSON."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(entries, dict):
        entries = entries.get("log_history", [entries])
    if not isinstance(entries, list):
        return None
    if all(isinstance(entry, list) and len(entry) == 3 for entry in entries):
        entries = [dict(zip(_TENSORBOARD, entry, strict=True)) for entry in entries]
    return Parsed("entry", [*enumerate(entries, 1)], [], may_be_cut=False)


def table(text: str) -> Parsed | None:
    """Parse CSV with a header, such as downloads of TensorBoard and wandb."""
    delimiter = max(",;\t", key=text.strip().partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        (_, header), *rows = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, ValueError):
        return None
    names = [name.strip() for name in header]
    runs = {name.rpartition(" - ")[0] for name in names if " - " in name}
    if len(runs) == 1:
        # wandb begins each name with the run.
        names = [name.rpartition(" - ")[2] for name in names]
    has_names = len(names) == len({*names}) > 1 and not _has_number(names)
    if not has_names or not rows or not _has_number(rows[0][1]):
        return None
    # wandb also writes the extremes of the steps that it left out.
    kept = [i for i, name in enumerate(names) if name[-5:] not in ("__MIN", "__MAX")]
    entries = [
        (place, {names[i]: _value(row[i]) for i in kept if row[i].strip()})
        for place, row in rows
        if len(row) == len(names)
    ]
    skipped = [place for place, row in rows if len(row) != len(names)]
    return Parsed("line", entries, skipped, may_be_cut=True) if entries else None


def lines(text: str) -> Parsed | None:
    """Parse JSON lines, dicts that a program printed, or one number per line.

    Lines without a dict are skipped if others have one.
    """
    entries: list[tuple[int, Any]] = []
    skipped = []
    for place, line in enumerate(text.split("\n"), 1):
        found = _entries_in(line)
        entries += [(place, entry) for entry in found]
        skipped += [place] if line.strip() and not found else []
    dicts = [entry for entry in entries if isinstance(entry[1], dict)]
    if dicts:
        skipped += [place for place, entry in entries if not isinstance(entry, dict)]
    if not entries:
        return None
    return Parsed("line", dicts or entries, sorted(skipped), may_be_cut=not dicts)


# In the order in which they are tried.
FORMATS: tuple[Callable[[str], Parsed | None], ...] = document, table, lines


def _entries_in(line: str) -> list[Any]:
    """Return the JSON value or the number that is a line, or the dicts in it."""
    for parse in (json.loads, float):
        try:
            return [parse(line)]
        except (ValueError, RecursionError):
            continue
    dicts = [dict(_PAIR.findall(each)) for each in _DICT.findall(line)]
    return [{k: _value(x) for k, x in each.items()} for each in dicts if each]


def _value(text: str) -> Any:
    number = number_of(text)
    return None if text == "None" else text if number is None else number


def _has_number(cells: list[str]) -> bool:
    return any(number_of(cell) is not None for cell in cells)
