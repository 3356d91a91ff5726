"""Find the steps that are not finite, and say whether they were applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ._ordered_run import NAMED, Run
from ._outliers import spans
from ._run import Fields, is_rejected

# Loss scaling causes less than this fraction of steps that are not finite, in so many
# consecutive steps, and if it does not begin at the start, more often than so.
_SOME, _RETRIES, _FEW = 0.05, 2, 3
# The least number of steps for a verdict on a rate, and consecutive steps that are no
# longer an event.
_ENOUGH, _STALLED = 20, 10


def not_finite(run: Run) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the steps that are not finite, those first that were applied."""
    findings, unknown = [], np.where(run.skipped, 0, np.nan)
    for name, fields in run.names.items():
        norms = {**fields["norm"], **fields.get("leaf_norm", {})}
        applied = unknown
        if "coefficient" in fields:
            coefficients = np.array([*fields["coefficient"].values()])
            applied = np.all(coefficients != 0, axis=0) & ~run.skipped
            applied &= run.is_state | ~is_rejected(fields)
        findings += _not_finite_of(run, name, norms, applied)
    has_loss = ~np.isnan(run.loss)
    loss = np.where(has_loss, run.loss, 0)
    losses = _not_finite_of(run, "loss", {"": loss}, unknown)
    # Rows without a loss at the end, more than twice as many as ever before.
    ends = np.flatnonzero([True, *has_loss, True])
    *gaps, last = np.diff(ends)
    if not losses and gaps and last > max(_FEW, 2 * max(gaps)):
        loss = np.where(np.arange(len(loss)) > ends[-2] - 1, np.nan, 0)
        losses = _not_finite_of(run, "loss", {"": loss}, unknown, "NaN or missing")
    findings += losses
    yield from sorted(findings, key=lambda finding: "probably NaN" not in finding[1])


def _not_finite_of(
    run: Run,
    name: str,
    numbers: Mapping[str, np.ndarray],
    applied: np.ndarray,
    what: str = "not finite",
) -> list[tuple[np.ndarray, str]]:
    """Return the steps of one transformation, or of the loss, that are not finite.

    `applied` holds whether each step was applied if it was not finite, NaN if unknown.
    """
    fields, rows = run.names.get(name, {}), _rows_not_finite(run, name, numbers)
    count, steps = (_count(fields, x) for x in ("nonfinite", "steps"))
    number, of = (count[-1], steps[-1]) if run.is_state else (rows.sum(), len(rows))
    is_often = run.is_state and of >= _ENOUGH and number > _SOME * of
    if not rows.any() and not is_often:
        return []
    first, end = spans(rows)[-1] if rows.any() else (0, 0)
    is_since = bool(rows[-1]) and 2 * (end - first) >= rows.sum()
    is_all = is_since and first == 0 and count[0] >= steps[0] > 0
    row = first if is_since else int(np.argmax(rows))
    text = f"{name}: {what}{f' in {number:.0f} of {of:.0f} steps' if of else ''}"
    if run.is_state and not is_all:
        text += ", also in the last one" if of and is_since else ""
    else:
        is_earlier = first == 0 and not (is_all or run.has_start)
        part = f" the last {end - first}" if end - first < rows.sum() else ""
        since = f",{part} since step {0 if is_all else run.step(first)}"
        since += ", or earlier" if is_earlier else ""
        text += since if is_since else f": {run.named(rows)}"
    bad = [part for part, x in numbers.items() if part and not np.isfinite(x[row])]
    if 0 < len(bad) < len([*filter(None, numbers)]):
        text += f", first in {', '.join(bad[:NAMED])}"
    advice = _restore(run, first, count[0], is_all=is_all)
    # A run that went on after such a step has not applied it.
    is_fatal = rows[-1] and (end - first == rows.sum() or end - first >= _STALLED)
    is_harmless = rows.any() and not np.any(applied[rows] != 0)
    taken = rows & (applied == 1)
    is_partly = not run.is_state and 0 < taken.sum() < rows.sum()
    if is_partly:
        first_taken = run.step(int(np.argmax(taken)))
        text += f"; {taken.sum()} of them applied, the first in step {first_taken}"
    if is_fatal and "skipped" not in fields and np.any(applied[first:] == 1):
        text += "" if is_partly else "; the step was applied"
        text += ": the parameters are probably NaN"
        advice = f"{advice.capitalize()}, and wrap the optimizer in optclip.skip."
    elif not rows.any():
        advice = "Wrap the optimizer in optclip.with_history to record which."
    elif is_since and fields and not (run.is_state or is_harmless):
        advice = f"If the parameters are not finite, {advice}."
    else:
        advice = run.call(rows, row)
    if "skipped" in fields or is_harmless:
        is_zeroed = "coefficient" in fields and "skipped" not in fields
        is_zeroed &= not (run.skipped.any() or is_rejected(fields)[rows].any())
        text += ". They were zeroed" if is_zeroed else ". None was applied"
    return [(rows, f"{text}. {advice}")]


def _restore(run: Run, first: int, count: float, *, is_all: bool) -> str:
    """Return what to do about parameters that are not finite since a row."""
    if is_all or (first == 0 and run.has_start and not run.is_state):
        return "check the initial parameters, or the checkpoint they come from"
    # The count includes the steps before the first row.
    number = float(run.steps[run.cause(first)] + (1 - count if first == 0 else 0))
    is_known = not run.is_state and (first or count)
    before = f"step {number:.15g}" if is_known else "the first of them"
    return f"restore a checkpoint from before {before}"


def _rows_not_finite(
    run: Run, name: str, numbers: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the rows that are not finite, unless loss scaling explains them."""
    every: np.ndarray = np.any(~np.isfinite([*numbers.values()]), axis=0)
    runs = spans(every)
    if run.is_state or not runs:
        return every
    # The rows before the first finite one are of the start too.
    is_start = run.start | (run.has_start & (np.cumsum(~every) == 0))
    rows = every & ~is_start
    rows[runs[-1][0] :] |= every[-1]
    # Scaling overflows to inf at the start and at intervals, and the run goes on.
    before = _count(run.names.get(name, {}), "nonfinite")[0] - every[0]
    is_usual = every[is_start].any() or before > 0
    is_usual |= len(runs) > _FEW and not np.isnan([*numbers.values()]).any()
    is_usual &= max((j - i for i, j in spans(rows)), default=0) <= _RETRIES
    is_usual &= rows.sum() <= _SOME * len(rows) and name in run.names
    rows &= ~is_usual
    rows[runs[-1][0] :] |= every[-1]
    return rows


def _count(fields: Fields, field: str) -> np.ndarray:
    """Return the largest count of the norms of a transformation; 0 without counts."""
    return np.max([*fields.get(field, {"": [0.0]}).values()], axis=0)
