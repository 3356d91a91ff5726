"""Write a report as JSON for other programs."""

from __future__ import annotations

import json
from typing import Any

from ._report import Norm, Report


def json_of(report: Report, version: str) -> str:
    """Return the report as a JSON object; numbers that do not exist are null."""
    first, last = report.steps
    document = {
        "optclip": version,
        "file": report.path,
        "entries": report.log.entries,
        "read": report.log.read,
        "first_step": first,
        "last_step": last,
        "summary": report.summary,
        "verdict": report.verdict,
        "norms": [_of_norm(norm) for norm in report.norms],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _of_norm(norm: Norm) -> dict[str, Any]:
    suggestion = norm.suggestion
    fields = norm._asdict() | {"largest_step": norm.at}
    del fields["at"], fields["problem"], fields["suggestion"]
    if suggestion is None:
        return fields | {"suggestion": None, "no_suggestion": norm.problem}
    quantiles = {str(q): x for q, x in suggestion.quantiles.items()}
    return fields | {
        "suggestion": suggestion._asdict() | {"quantiles": quantiles},
        "no_suggestion": None,
    }
