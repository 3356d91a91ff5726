"""Write a report as text for a terminal."""

from __future__ import annotations

from .._monitor import percent
from ._log import Log
from ._report import Norm, Report

NOTHING = "nothing stands out"


def text_of(report: Report) -> str:
    """Return the report as lines of text."""
    lines = [f"{report.path}: {origin(report)}"]
    if report.summary:
        lines += ["", "Last step", *report.summary]
    lines += ["", "All steps"]
    lines += [f"{norm.label}: {phrase(norm)}" for norm in report.norms]
    lines += [f"-> {finding}" for finding in report.verdict or [NOTHING]]
    for norm in report.norms:
        lines += ["", f"Suggested threshold for {norm.label}"]
        lines += [str(norm.suggestion) if norm.suggestion else f"none: {norm.problem}"]
    lines += ["", left_out(report)] if report.left else []
    return "\n".join(lines)


def origin(report: Report) -> str:
    """Return what was read."""
    log, (first, last) = report.log, report.steps
    return f"{_what(log)}, steps {first} to {last}"


def _what(log: Log) -> str:
    units = {"line": "lines", "entry": "entries"}[log.unit]
    units = units if log.entries != 1 else log.unit
    of = f"{log.read} of {log.entries}" if log.read < log.entries else f"{log.entries}"
    if not log.is_bare:
        return f"metrics in {of} {units}"
    return f"{log.norm!r} in {of} {units}" if log.norm else f"{of} {units}"


def phrase(norm: Norm) -> str:
    """Return the norms of a run and how often they were clipped."""
    phrases = [f"{norm.steps} norms"]
    if norm.median is not None:
        phrases += [f"median {norm.median:.4g}"]
        phrases += [f"largest {norm.largest:.4g} in step {norm.at}"]
    if norm.nonfinite:
        phrases += [f"{norm.nonfinite} not finite"]
    if norm.clipped is not None:
        phrases += [f"{percent(norm.clipped)} clipped"]
    return ", ".join(phrases)


def left_out(report: Report) -> str:
    """Return how many groups or leaves are not reported."""
    return f"and {report.left} more groups or leaves with smaller norms"
