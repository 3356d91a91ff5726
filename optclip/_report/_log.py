"""Read a log file, and find the metrics of optclip or the norms of another library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._monitor import (
    PROBE_FIELDS,
    Fields,
    clips_in,
    fields_by_name,
    numbers_in,
    only,
)

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
                if isinstance(x, list):
                    raise LogError(
                        f"{where} has a list at {key!r}. Log one entry per step, with a"
                        " number."
                    )
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
    if isinstance(document, dict) and (rest or "log_history" in document):
        # Hugging Face's state.
        document = document.get("log_history")
        if not isinstance(document, list):
            raise LogError(f"{path} has no list 'log_history'. {FORMATS}")
    return dict(enumerate(document, 1)) if isinstance(document, list) else None


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


# Names of the norm in other libraries, before clipping first: some log both.
_NAMES = (
    ("grad_norm_before_clip", "grad_norm_pre_clip", "raw_grad_norm"),
    (
        "grad_norm", "gradient_norm", "global_grad_norm", "grad_global_norm",
        "total_grad_norm", "global_norm", "grad_l2_norm", "gnorm",
    ),
)  # fmt: skip
_STEPS = ("step", "global_step", "_step", "train/global_step")


class Log(NamedTuple):
    """Hold a logged run.

    Attributes:
      columns: One array over the steps per key of `metrics`, and `step` if logged. A
        norm of another library is a transformation that has a norm only.
      norm: The key of such a norm; None for the metrics of optclip, and for numbers
        without keys.
      is_bare: Whether the columns are of such a norm.
      read: Number of entries that were read.
      entries: Number of all entries.
      unit: What they are, `"line"` or `"entry"`.
    """

    columns: dict[str, np.ndarray]
    norm: str | None
    is_bare: bool
    read: int
    entries: int
    unit: str


def log_of(log: Entries, norm: str | None) -> Log:
    """Return the run in a log; `norm` is the key of its norm, None to look for it.

    Raises:
      LogError: It has no norms, or steps with different keys.
    """
    metrics = {} if norm or log.is_bare else _metrics_in(log.keys)
    keys = numbers_in(metrics) or [_norm_in(log, norm)]
    index = [i for i, row in enumerate(log.rows) if not row.keys().isdisjoint(keys)]
    there = set().union(*(log.rows[i] for i in index))
    step = next((key for key in _STEPS if key in there), None)
    _check_same(log, {*keys} | ({step} if step is not None else set()), index)
    columns = {key: log.column(key, index) for key in keys}
    clips = [fields for fields in metrics.values() if "norm" in fields]
    norms = [key for fields in clips for key in fields["norm"].values()]
    for key in norms or keys:
        _check(log, key, index, columns[key] < 0, "is negative")
    counts = [only(fields, "steps") for fields in metrics.values() if "steps" in fields]
    if step is not None:
        columns["step"] = log.column(step, index)
        _check(log, step, index, ~np.isfinite(columns["step"]), "is not finite")
    for key in counts:
        _check(log, key, index, ~np.isfinite(columns[key]), "is not finite")
    key = None
    if not metrics:
        # A slash would divide the name into a name and a field.
        (key,) = keys
        columns[f"{key.split('/')[-1]}/norm"] = columns.pop(key)
    shown = None if log.is_bare else key
    return Log(columns, shown, not metrics, len(index), len(log.rows), log.unit)


def _metrics_in(keys: list[str]) -> dict[str, Fields]:
    """Return the keys that `metrics` wrote, of probes and transformations with norms.

    Trainers log keys of the same form, such as ``eval/steps``.
    """
    names = fields_by_name({key: key for key in keys if key == key.strip("/")})
    clips = clips_in(names)
    probes = [n for n, fields in names.items() if fields.keys() >= {*PROBE_FIELDS}]
    for name in {*clips} - {*probes}:
        names[name].pop(PROBE_FIELDS[0], None)
    return {name: names[name] for name in (*clips, *probes)} if clips else {}


def _norm_in(log: Entries, norm: str | None) -> str:
    """Return the key of the norm."""
    if log.is_bare and norm is None:
        return BARE
    if norm in log.keys and not log.is_bare:
        return str(norm)
    numbers = [
        key for key in log.keys if all(is_number(row.get(key, 0)) for row in log.rows)
    ]
    listed = f"{', '.join(map(repr, numbers[:20]))}{', ...' if numbers[20:] else ''}"
    if norm is not None:
        present = "numbers without keys" if log.is_bare else f"the numbers {listed}"
        raise LogError(f"{log.path} has no {norm!r}, but {present}.")
    for names in _NAMES:
        matches = [key for key in log.keys if key.split("/")[-1].lower() in names]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LogError(
                f"{log.path} has several norms: {', '.join(map(repr, matches))}. Pass"
                f" one of them, such as --norm {matches[0]}."
            )
    raise LogError(
        f"{log.path} has no metrics of optclip and no 'grad_norm'; its numbers are"
        f" {listed or 'none'}. Pass the key of the norm with --norm KEY."
    )


def _check_same(log: Entries, keys: set[str], index: list[int]) -> None:
    """Raise an error unless these entries have the same of these keys."""
    first = keys & log.rows[index[0]].keys()
    for i in index:
        if odd := sorted(first ^ (keys & log.rows[i].keys())):
            places = log.places[index[0]], log.places[i]
            has, lacks = places if odd[0] in first else places[::-1]
            raise LogError(
                f"{log.at(places[1])} differs in its keys: {log.unit} {has} has"
                f" {odd[0]!r}, {log.unit} {lacks} does not. Log the same keys in each"
                " step."
            )


def _check(
    log: Entries, key: str, index: list[int], is_bad: np.ndarray, problem: str
) -> None:
    if is_bad.any():
        place = log.places[index[int(np.argmax(is_bad))]]
        raise LogError(f"{log.at(place)}: {key!r} {problem}, which no run logs.")
