"""Write a report: the summary, the verdict, and a threshold for each norm."""

from __future__ import annotations

import contextlib
import json
from typing import NamedTuple

import numpy as np

from .._monitor import (
    Suggestion,
    clips_in,
    fields_by_name,
    has_run,
    percent,
    suggest,
    summarized,
)
from .._plot import clip_in, steps_in
from ._log import Log

# Of more groups or leaves, those with the largest median norms are reported.
MOST = 10
_PLURALS = {"line": "lines", "entry": "entries"}


class Norm(NamedTuple):
    """Hold what a run says about one norm.

    Attributes:
      name: Name of the transformation.
      part: Label of the group or path of the leaf; None for the only norm.
      steps: Number of norms.
      nonfinite: Number of NaN or inf norms.
      median: Median of the finite norms; None if there are none.
      largest: Largest finite norm; None if there are none.
      largest_step: Its step.
      threshold: The last finite threshold of the run; None if it clipped nothing.
      clipped: Fraction of the steps that the run clipped; None without a threshold.
      suggestion: The suggested threshold, if there is one.
      no_suggestion: Why there is none.
    """

    name: str
    part: str | None
    steps: int
    nonfinite: int
    median: float | None
    largest: float | None
    largest_step: float | None
    threshold: float | None
    clipped: float | None
    suggestion: Suggestion | None
    no_suggestion: str | None

    @property
    def label(self) -> str:
        """The name and the part, as in the keys of `metrics`."""
        return self.name if self.part is None else f"{self.name}/{self.part}"


class Report(NamedTuple):
    """Hold a report.

    Attributes:
      path: Name of the file.
      log: The run.
      steps: The first and the last step.
      restarts: How often the step goes back.
      summary: Lines about the last step; empty for norms of another library.
      verdict: What stands out, and what to change.
      norms: What the run says about each norm.
      left: Number of groups or leaves that are not in `norms`.
    """

    path: str
    log: Log
    steps: list[float]
    restarts: int
    summary: list[str]
    verdict: list[str]
    norms: list[Norm]
    left: int


def report_of(path: str, log: Log, rate: float, skip_first: float) -> Report:
    """Return the report on a run; `rate` and `skip_first` are passed to `suggest`."""
    steps = steps_in(log.columns).at
    about, verdict = summarized({**log.columns, "step": steps})
    norms, left = [], 0
    names = fields_by_name(log.columns)
    every = clips_in(names)
    # A norm of `skip` has a threshold for steps to skip, not to clip.
    for name in [n for n in every if "skipped" not in names[n]] or every:
        sizes = {
            part: np.median(np.where(np.isfinite(x), x, 0))
            for part, x in names[name]["norm"].items()
        }
        parts = sorted(sizes, key=sizes.__getitem__, reverse=True)
        norms += [
            _norm_of(log, name, part or None, steps, rate, skip_first)
            for part in parts[:MOST]
        ]
        left += len(parts[MOST:])
    ends = _numbers(steps[[0, -1]])
    restarts = int(np.sum(np.diff(steps) < 0))
    return Report(
        path, log, ends, restarts, [] if log.norm else about, verdict, norms, left
    )


def _numbers(steps: np.ndarray) -> list[float]:
    """Return the numbers of steps, as integers where they are."""
    return [int(x) if x == int(x) else x for x in steps.tolist()]


def _norm_of(
    log: Log,
    name: str,
    part: str | None,
    steps: np.ndarray,
    rate: float,
    skip_first: float,
) -> Norm:
    names = fields_by_name(log.columns)
    is_run = has_run(names, name)
    norms, steps = names[name]["norm"][part or ""][is_run], steps[is_run]
    finite = norms[np.isfinite(norms)]
    threshold = clipped = suggestion = problem = None
    with contextlib.suppress(ValueError):  # The log has the norm only.
        clip = clip_in(log.columns, name, part)
        if thresholds := clip.threshold[np.isfinite(clip.threshold)].tolist():
            threshold, clipped = thresholds[-1], float(np.mean(clip.clipped))
    if part is None and "fraction" in names[name]:
        problem = (
            "each step has several norms, of which one is recorded; record='leaves'"
            " records each leaf"
        )
    else:
        try:
            suggestion = suggest(norms, rate, skip_first=skip_first)
        except ValueError as error:
            problem = str(error)
    at = int(np.argmax(np.where(np.isfinite(norms), norms, -1)))
    return Norm(
        name=name,
        part=part,
        steps=len(norms),
        nonfinite=len(norms) - len(finite),
        median=float(np.median(finite)) if finite.size else None,
        largest=float(finite.max()) if finite.size else None,
        largest_step=_numbers(steps)[at] if finite.size else None,
        threshold=threshold,
        clipped=clipped,
        suggestion=suggestion,
        no_suggestion=problem,
    )


def text_of(report: Report) -> str:
    """Return the report as lines of text, for a terminal."""
    lines = [f"{report.path}: {_origin(report)}"]
    lines += [f"note: {note}" for note in report.log.notes]
    if report.summary:
        lines += ["", "Last step", *report.summary]
    lines += ["", "All steps"]
    lines += [f"{norm.label}: {phrase(norm)}" for norm in report.norms]
    lines += [f"-> {finding}" for finding in report.verdict or ["nothing stands out"]]
    for norm in report.norms:
        suggestion = norm.suggestion or f"none: {norm.no_suggestion}"
        lines += ["", f"Suggested threshold for {norm.label}", str(suggestion)]
    if report.left:
        lines += ["", f"and {report.left} more groups or leaves with smaller norms"]
    return "\n".join(lines)


def _origin(report: Report) -> str:
    """Return what was read."""
    log, (first, last) = report.log, report.steps
    units = log.unit if log.entries == 1 else _PLURALS[log.unit]
    count = f"{log.read} of {log.entries}" if log.read < log.entries else log.entries
    of = f"'{log.norm}'" if log.norm else "metrics"
    restarts = f", {_counted(report.restarts, 'restart')}" if report.restarts else ""
    steps = "numbered" if log.is_numbered else "steps"
    return f"{of} in {count} {units}, {steps} {first} to {last}{restarts}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def phrase(norm: Norm) -> str:
    """Return the norms of a run and how often they were clipped."""
    phrases = [_counted(norm.steps, "norm")]
    if norm.median is not None:
        phrases += [f"median {norm.median:.4g}"]
        phrases += [f"largest {norm.largest:.4g} in step {norm.largest_step}"]
    if norm.nonfinite:
        phrases += [f"{norm.nonfinite} not finite"]
    if norm.clipped is not None:
        phrases += [f"{percent(norm.clipped)} clipped"]
    return ", ".join(phrases)


def json_of(report: Report, version: str) -> str:
    """Return the report as a JSON object; numbers that do not exist are null."""
    norms = [
        norm._asdict() | {"suggestion": norm.suggestion and norm.suggestion._asdict()}
        for norm in report.norms
    ]
    document = {
        "optclip": version,
        "file": report.path,
        "entries": report.log.entries,
        "read": report.log.read,
        "first_step": report.steps[0],
        "last_step": report.steps[1],
        "restarts": report.restarts,
        "notes": report.log.notes,
        "summary": report.summary,
        "verdict": report.verdict,
        "norms": norms,
    }
    return json.dumps(document, indent=2, allow_nan=False)
