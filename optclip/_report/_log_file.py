"""Read a log file: JSON lines, one number per line, or one JSON document."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from ._errors import LogError
from ._progress import Progress
from ._table import Table

FORMATS = "Pass JSON lines, one number per line, a JSON array, or a trainer_state.json."


def read(path: str) -> Table:
    """Return the entries of a log.

    Raises:
      LogError: It is empty, or a line is neither JSON nor a number.
      OSError: There is no such file, or it cannot be read.
    """
    with open(path, "rb") as file:
        filled = (line for line in file if line.strip())
        first = [*itertools.islice(filled, 2)]
        if not first:
            raise LogError(f"{path} is empty. {FORMATS}")
        file.seek(0)
        is_document = _is_document(
            [_decoded(x, i, path) for i, x in enumerate(first, 1)]
        )
        table = _of_document(file, path) if is_document else _of_lines(file, path)
    if not table.places:
        raise LogError(f"{path} has no entries. {FORMATS}")
    return table


def _is_document(first: list[str]) -> bool:
    """Return whether the first two lines begin a document, not one entry per line."""
    values = [_value(line) for line in first]
    if len(first) == 1 and isinstance(values[0], dict):
        return any(isinstance(x, list) for x in values[0].values())
    if isinstance(values[0], list):
        return True
    # A damaged first line of JSON lines is reported as such, not as a document.
    return (
        values[0] is None
        and first[0].lstrip()[0] in "[{"
        and not isinstance(values[-1], dict)
    )


def _value(line: str) -> Any:
    """Return the JSON value or number of a line, or None if it is neither."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        pass
    try:
        return float(line)
    except ValueError:
        return None


def _of_lines(file: BinaryIO, path: str) -> Table:
    table, progress = Table(path, "line"), Progress(os.fstat(file.fileno()).st_size)
    for number, line in enumerate(file, 1):
        progress.add(line)
        if not line.strip():
            continue
        text = _decoded(line, number, path)
        value = _value(text)
        if value is None and table.places and not line.endswith(b"\n"):
            # The program ended, or was still writing.
            note = f"note: line {number}, the last, is incomplete and was skipped"
            print(note, file=sys.stderr)
        elif value is None:
            raise LogError(
                f"Line {number} of {path} is neither JSON nor a number:"
                f" {text.strip()!r:.60}. {FORMATS}"
            )
        else:
            table.add(number, value)
    progress.end()
    return table


def _of_document(file: BinaryIO, path: str) -> Table:
    lines = [_decoded(line, i, path) for i, line in enumerate(file, 1)]
    try:
        document = json.loads("".join(lines))
    except json.JSONDecodeError as error:
        raise LogError(
            f"Line {error.lineno} of {path} is not JSON: {error.msg}, column"
            f" {error.colno}. {FORMATS}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path} is not a log: {error}. {FORMATS}") from error
    table = Table(path, "entry")
    for number, entry in enumerate(_entries(document, path), 1):
        table.add(number, entry)
    return table


def _entries(document: Any, path: str) -> Iterator[Any]:
    """Yield the entries of a list, of Hugging Face's state, or of a dict of lists."""
    entries = document
    if isinstance(document, dict):
        entries = document.get("log_history")
    if isinstance(entries, list):
        yield from entries
        return
    columns = {key: x for key, x in document.items() if isinstance(x, list)}
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


def _decoded(line: bytes, number: int, path: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LogError(
            f"Line {number} of {path} is not UTF-8 text. {FORMATS}"
        ) from error
