"""Save results, one JSON file per backend, and format them as tables."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def save(path: Path, benchmark: str, head: Mapping[str, Any], rows: Any) -> None:
    """Replace the whole table of a benchmark, so that all rows have the same commit."""
    data = read(path) if path.exists() else {}
    data[benchmark] = {**head, "rows": rows}
    path.write_text(_text(data))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _text(data: Mapping[str, Any]) -> str:
    """Format as JSON with one line per row, for readable diffs."""
    texts = []
    for benchmark, result in data.items():
        head = {key: rounded(each) for key, each in result.items() if key != "rows"}
        fields = [f"  {json.dumps(k)}: {json.dumps(each)}" for k, each in head.items()]
        rows = ",\n".join(f"   {json.dumps(rounded(row))}" for row in result["rows"])
        fields.append(f'  "rows": [\n{rows}\n  ]')
        texts.append(f" {json.dumps(benchmark)}: {{\n" + ",\n".join(fields) + "\n }")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def rounded(data: Any) -> Any:
    """Round floats to four digits; NaN and inf, which JSON lacks, become text."""
    if isinstance(data, Mapping):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.4g}") if math.isfinite(data) else str(data)
    return data


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table with a column for each key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " to ".join(map(_cell, value))
    return f"{value:.3g}" if isinstance(value, float) and value < 1000 else str(value)
