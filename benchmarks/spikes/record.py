"""What is saved: one JSON file with a line for each method on each model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results import rounded

Row = Mapping[str, Any]


class Spread(NamedTuple):
    """The median of all seeds and the range of them."""

    median: float
    low: float
    high: float


def spread(values: Sequence[Any]) -> Spread:
    """Of numbers as saved; NaN counts as larger than any."""
    found = np.nan_to_num([float(x) for x in values], nan=np.inf, posinf=np.inf)
    return Spread(float(np.median(found)), float(found.min()), float(found.max()))


def final(row: Row) -> Spread:
    """The held-out loss in the end."""
    return spread(row["held_out"])


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write the file."""
    head = json.dumps(rounded({k: v for k, v in data.items() if k != "rows"}), indent=1)
    lines = ",\n".join(f"  {json.dumps(rounded(row))}" for row in data["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def read(path: Path) -> dict[str, Any]:
    """The file as written."""
    return json.loads(path.read_text())


def reference(data: Mapping[str, Any], model: str) -> Row | None:
    """The run of a model without spikes."""
    found = [row for row in data["rows"] if row["model"] == model and not row["spikes"]]
    return found[0] if found else None


def ranked(data: Mapping[str, Any], model: str) -> list[Row]:
    """The methods on a model, the lowest loss first; the best of each family only."""
    rows = sorted(of_model(data, model), key=final)
    seen: set[str] = set()
    found = []
    for row in rows:
        if not row["family"] or row["family"] not in seen:
            found.append(row)
            seen.add(row["family"])
    return found


def of_model(data: Mapping[str, Any], model: str) -> list[Row]:
    """All methods on a model, with spikes."""
    return [row for row in data["rows"] if row["model"] == model and row["spikes"]]


def models(data: Mapping[str, Any]) -> list[str]:
    """The names of the models, in order."""
    return list(data["models"])


def label(row: Row) -> str:
    """What a method is called in tables and pictures."""
    return f"{row['method']}, best" if row["family"] else row["method"]


def key(row: Row) -> str:
    """What one method is on both models: a family, or its name."""
    return row["family"] or row["method"]


def title(key: str) -> str:
    """What it is called there."""
    return "global norm, tuned" if key == "tuned" else key


def mean_ranks(data: Mapping[str, Any]) -> dict[str, float]:
    """The mean of a method's places on all models, the best first."""
    places: dict[str, list[int]] = {}
    for model in models(data):
        for place, row in enumerate(ranked(data, model), 1):
            places.setdefault(key(row), []).append(place)
    means = {name: float(np.mean(found)) for name, found in places.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))
