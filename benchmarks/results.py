"""The JSON file: every case is merged into it as soon as it is measured."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import Case, Options


class Results:
    """Measurements of one machine, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = read(path) if path.exists() else {"machines": [], "parts": {}}
        self._commit = machine.commit()  # of the code that is imported by now

    def add(
        self, part: str, case: Case, rows: Mapping[str, Any], options: Options
    ) -> None:
        """Put one case in, in place of an earlier measurement of it, and save."""
        now, machines = machine.describe(), self._data["machines"]
        if now not in machines:
            machines.append(now)
        cases = self._data["parts"].setdefault(part, {})
        cases[case.name] = {
            **case.labels,
            "title": case.title,
            **machine.moment(),
            "small": options.small,
            "machine": machines.index(now),
            "commit": self._commits(),
            "rows": rows,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(_text(self._data))

    def _commits(self) -> str | None:
        """The commit; both, if another was made while this ran."""
        now = machine.commit()
        return now if now == self._commit else f"{self._commit} to {now}"


def read(path: Path) -> dict[str, Any]:
    """A saved file."""
    data = json.loads(path.read_text())
    if "machine" in data:  # as saved when a file had one for all cases
        data["machines"] = [data.pop("machine")]
        del data["machines"][0]["commit"]
    return data


def _text(data: Any) -> str:
    """JSON with each list on one line: short, and with readable differences."""
    text = json.dumps(rounded(data), indent=1)
    return (
        re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"
    )


def rounded(data: Any) -> Any:
    """The same with floats of four digits, and those that JSON lacks as text."""
    if isinstance(data, Mapping):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.4g}") if math.isfinite(data) else str(data)
    return data
