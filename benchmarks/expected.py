"""The goals that a whole run would judge, to tell which of them were not measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import PARTS, Options, cases_of
from benchmarks.verdicts import Verdict, on_gpu

# Titles, with the verdicts of each.
Tables = Sequence[tuple[str, Sequence[Verdict]]]


class Anything(dict[str, Any]):
    """Rows in which every contender ran once, whatever it is called."""

    ROW: Mapping[str, Any] = {
        "seconds": [1.0], "faults": [0], "temp_bytes": 0, "gradient_bytes": 1,
        "moved_bytes": 1, "kernels": 1, "state_bytes": 0,
    }  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        return self.ROW

    def __getitem__(self, key: str) -> Any:
        return self.ROW


def as_if_measured(data: Mapping[str, Any]) -> dict[str, Any]:
    """All cases of a whole run on this kind of machine, with numbers that mean nothing."""
    small = any(c["small"] for part in data["parts"].values() for c in part.values())
    options = Options(small=small, long=True, gpu=on_gpu(data))
    parts = {
        part: {
            case.name: {**case.labels, "title": case.title, "rows": Anything()}
            for case in cases_of(part, options)
        }
        for part in PARTS
    }
    return {"machines": data["machines"], "parts": parts}


def missing(found: Tables, wanted: Tables) -> dict[str, list[str]]:
    """By table, the rows with a goal that are wanted and were not found."""
    result: dict[str, list[str]] = {}
    for (title, measured), (_, verdicts) in zip(found, wanted, strict=True):
        here = {each.what for each in measured}
        lacking = [v.what for v in verdicts if v.goal is not None]
        lacking = [what for what in lacking if what not in here]
        if lacking:
            result[title] = lacking
    return result


def not_run(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """By part, the cases of a whole run that are not in the data."""
    whole = as_if_measured(data)["parts"]
    lacking = {
        part: [name for name in cases if name not in data["parts"].get(part, {})]
        for part, cases in whole.items()
    }
    return {part: names for part, names in lacking.items() if names}
