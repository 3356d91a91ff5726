"""Say what recorded numbers mean, the gravest first, each with one next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ._outliers import Outliers, outliers, spans, start_of
from ._run import Fields, at, has_run, is_rejected, only
from ._text import percent

# A fraction of clipped steps from which a verdict is given, if it shrinks the updates
# to this fraction; and the fraction of the squared norm of one of so many leaves.
_NEARLY_ALL, _SHRINKS, _ALONE, _LEAVES = 0.9, 0.1, 0.99, 5
# A fraction of skipped steps that is no longer one of spikes, and of steps that are not
# finite, of which loss scaling causes less, in so many consecutive steps, and if it
# does not begin at the start, more often than so.
_OFTEN, _SOME, _RETRIES, _FEW = 0.2, 0.05, 2, 3
# The least number of steps for a verdict on a rate, and on zeros.
_ENOUGH, _MANY = 20, 100
# The number of consecutive skipped steps that is no longer a spike, and of runs of
# steps and of leaves that are named.
_STALLED, _NAMED = 10, 5
# A threshold follows a spike if it rises by this factor from the steps before the spike
# to those after it.
_FOLLOWS, _NEAR = 3, 20
# Smaller norms, relative to the largest of the step, are rounding errors.
_NOISE = 1e-6

_EXPLAIN = "Call optclip.explain with the batch of"
# The rule that docs/production_runs.md begins with.
_RULE = "max_norm=scaled(quantile(0.5, window=200), 10.0)"


# The rows that a finding is about, none if it is about the whole run, and its sentence.
_Finding = tuple[np.ndarray, str]


class _Run(NamedTuple):
    """Hold the recorded steps.

    Attributes:
      names: The transformations, `skip` first, since it records all steps.
      steps: Number of each row.
      is_state: Whether there is one row, of a state.
      loss: Loss of each row, NaN without one.
      has_start: Whether the first row is at the start of the run.
      is_run: For each transformation, whether it ran in each row.
      outliers: For each transformation, what stands out in each of its norms.
      of_loss: What stands out in the loss.
      skipped: Whether a `skip` skipped each row.
      explained: Whether a graver finding explains each row.
    """

    names: Mapping[str, Fields]
    steps: np.ndarray
    is_state: bool
    loss: np.ndarray
    has_start: bool
    is_run: Mapping[str, np.ndarray]
    outliers: Mapping[str, Mapping[str, Outliers]]
    of_loss: Outliers
    skipped: np.ndarray
    explained: np.ndarray

    @property
    def start(self) -> np.ndarray:
        """The rows of the start of the run."""
        rows = np.arange(len(self.explained))
        return (rows < start_of(len(rows))) & self.has_start

    def named(self, rows: np.ndarray) -> str:
        """Return the numbers of some rows as text."""
        ends = [(self.step(i), self.step(j - 1)) for i, j in spans(rows)]
        words = [
            first if first == last else f"{first} to {last}"
            for first, last in ends[: _NAMED + 1]
        ]
        return ", ".join([*words[:_NAMED], *["..."][: len(words) - _NAMED]])

    def step(self, row: int) -> str:
        """Return the number of a row as text."""
        return f"{self.steps[row]:.15g}"

    def cause(self, row: int) -> int:
        """Return the first of the applied rows that stand out just before a row."""
        found = [x.rows for parts in self.outliers.values() for x in parts.values()]
        stands_out = np.any([self.of_loss.rows, *found], axis=0) & ~self.skipped
        return row - int(np.argmin([*stands_out[:row][::-1], False]))

    def call(self, rows: np.ndarray, row: int) -> str:
        """Return the advice to explain the first step of the rows around one."""
        first = next(i for i, j in spans(rows) if i <= row < j)
        cause = self.cause(first)
        is_named = cause == row and rows.sum() == 1
        which = "that step" if is_named else f"step {self.step(cause)}"
        return f"{_EXPLAIN} {which}."


def verdicts(
    names: Mapping[str, Fields],
    steps: np.ndarray | None,
    loss: np.ndarray | None = None,
) -> list[str]:
    """Return a text for each finding in the metrics of one step or more, oldest first.

    Args:
      names: The transformations, with an array over the steps for each number.
      steps: The recorded steps of a history; None for the metrics of one step.
      loss: The loss of each step, NaN where it is not known; None without losses.
    """
    if not names:
        return []
    run, lines = _run_of(names, steps, loss), []
    # Each function reads which rows the findings before it explain.
    for findings in (
        _not_finite, _stuck, _of_loss, _of_norms, _of_skipped, _of_thresholds,
        _of_zeros, _of_rates,
    ):  # fmt: skip
        for rows, text in findings(run):
            if not rows.any() or (rows & ~run.explained).any():
                lines.append(text)
                # An applied step has consequences in the next one.
                run.explained[:] |= rows
                run.explained[1:] |= (rows & ~run.skipped)[:-1]
    return lines


def _run_of(
    names: Mapping[str, Fields], steps: np.ndarray | None, loss: np.ndarray | None
) -> _Run:
    names = dict(sorted(names.items(), key=lambda item: "skipped" not in item[1]))
    if loss is None:
        losses = [only(fields, "loss") for fields in names.values()]
        loss = next((x for x in losses if x is not None), None)
    if steps is not None and np.any(np.diff(steps) < 0):
        order = _in_order(steps)
        names = {name: at(fields, order) for name, fields in names.items()}
        steps, loss = steps[order], None if loss is None else loss[order]
    is_run = {name: has_run(names, name) for name in names}
    ran = np.any([*is_run.values()], axis=0)
    if not ran.all():
        # A wrapper such as optax.MultiSteps repeats the numbers of a skipped step.
        names = {name: at(fields, ran) for name, fields in names.items()}
        is_run = {name: x[ran] for name, x in is_run.items()}
        steps, loss = (None if x is None else x[ran] for x in (steps, loss))
    none = np.zeros(len(next(iter(is_run.values()))), bool)
    skips = [only(fields, "consecutive", none) for fields in names.values()]
    # The first step of a log depends on how often it has one.
    is_state, steps = steps is None, np.zeros(1) if steps is None else steps
    has_start = bool(steps[0] <= 1 + 2 * np.median([0, *np.diff(steps[:9])]))
    skipped = np.any(np.array(skips) > 0, axis=0)
    loss = np.full(len(none), np.nan) if loss is None else loss
    finite = np.where(np.isinf(loss), np.nan, loss)
    of_loss = outliers(finite, is_loss=True, has_start=has_start)
    options = {"has_start": has_start, "explained": of_loss.rows}
    found = {
        name: {} if is_state else _outliers_of(fields, is_run[name], **options)
        for name, fields in names.items()
    }
    return _Run(
        names, steps, is_state, loss, has_start, is_run, found, of_loss, skipped, none
    )  # fmt: skip


def _in_order(steps: np.ndarray) -> np.ndarray:
    """Return the rows by step, without those that a later attempt has repeated.

    A run that returns to a checkpoint repeats the steps after it. Writers that take
    turns repeat none, and steps that begin anew in each epoch have no such order.
    """
    rows, is_kept = np.arange(len(steps)), np.ones(len(steps), bool)
    starts = np.flatnonzero(np.diff(steps) < 0) + 1
    is_repeated = len(np.unique(steps)) < len(steps)
    if is_repeated and len(starts) > _MANY:
        return rows
    for first, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        last = steps[end - 1]
        if is_repeated:
            is_kept[:first] &= (steps[:first] < steps[first]) | (steps[:first] > last)
    return rows[is_kept][np.argsort(steps[is_kept], kind="stable")]


def _outliers_of(
    fields: Fields, is_run: np.ndarray, **options: Any
) -> dict[str, Outliers]:
    """Return what stands out in each norm of a transformation."""
    found = {}
    for parts in filter(None, (fields.get(field) for field in ("leaf_norm", "norm"))):
        norms = np.array([np.where(is_run, x, np.nan) for x in parts.values()])
        norms[~np.isfinite(norms)] = np.nan
        norms[norms < _NOISE * np.fmax.reduce(norms, axis=0)] = np.nan
        for part, x in zip(parts, norms, strict=True):
            fraction = fields.get("fraction", {}).get(part, np.zeros(1))
            # The most clipped of several norms jumps between them.
            is_of_many = np.any((fraction > 0) & (fraction < 1))
            if not is_of_many and (part or "" not in fields.get("fraction", {})):
                rare = 0.005 if part else 0.05
                found[part] = outliers(x, is_loss=False, rare=rare, **options)
    return found


def _not_finite(run: _Run) -> Iterator[_Finding]:
    """Yield the steps that are not finite, those first that were applied."""
    findings, unknown = [], np.where(run.skipped, 0, np.nan)
    for name, fields in run.names.items():
        norms = {**fields["norm"], **fields.get("leaf_norm", {})}
        norms = {p: np.where(run.is_run[name], x, 0) for p, x in norms.items()}
        applied = unknown
        if "coefficient" in fields:
            coefficients = np.array([*fields["coefficient"].values()])
            applied = np.all(coefficients != 0, axis=0) & ~run.skipped
            applied &= run.is_state | ~is_rejected(fields)
        findings += _not_finite_of(run, name, norms, applied)
    loss = np.where(_has_loss(run), run.loss, 0)
    findings += _not_finite_of(run, "loss", {"": loss}, unknown)
    yield from sorted(findings, key=lambda finding: "probably NaN" not in finding[1])


def _has_loss(run: _Run) -> np.ndarray:
    """Return the rows that have a loss, of which NaN may be one."""
    has_loss = ~np.isnan(run.loss)
    for name, fields in run.names.items():
        if "loss" in fields:
            # A `skip` that has a limit for the loss reads it in each step.
            return has_loss | (np.isnan(only(fields, "loss")) & run.is_run[name])
    return has_loss


def _not_finite_of(
    run: _Run, name: str, numbers: Mapping[str, np.ndarray], applied: np.ndarray
) -> list[_Finding]:
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
    text = f"{name}: not finite{f' in {number:.0f} of {of:.0f} steps' if of else ''}"
    if run.is_state and not is_all:
        text += ", also in the last one" if of and is_since else ""
    else:
        is_earlier = first == 0 and not (is_all or run.has_start)
        since = f", since step {0 if is_all else run.step(first)}"
        since += ", or earlier" if is_earlier else ""
        text += since if is_since else f": {run.named(rows)}"
    bad = [part for part, x in numbers.items() if part and not np.isfinite(x[row])]
    if 0 < len(bad) < len([*filter(None, numbers)]):
        text += f", first in {', '.join(bad[:_NAMED])}"
    advice = _restore(run, first, count[0], is_all=is_all)
    # A run that went on after such a step has not applied it.
    is_fatal = rows[-1] and (end - first == rows.sum() or end - first >= _STALLED)
    is_harmless = rows.any() and not np.any(applied[rows] != 0)
    taken = rows & (applied == 1)
    is_partly = not run.is_state and 0 < taken.sum() < rows.sum()
    if is_partly:
        which = f"the first in step {run.step(int(np.argmax(taken)))}"
        text += f"; {taken.sum()} of them applied, {which}"
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
        is_zeroed = "coefficient" in fields and not run.skipped.any()
        is_zeroed = is_zeroed and not is_rejected(fields)[rows].any()
        text += ". They were zeroed" if is_zeroed else ". None was applied"
    return [(rows, f"{text}. {advice}")]


def _restore(run: _Run, first: int, count: float, *, is_all: bool) -> str:
    """Return what to do about parameters that are not finite since a row."""
    if is_all or (first == 0 and run.has_start and not run.is_state):
        return "check the initial parameters, or the checkpoint they come from"
    # The count includes the steps before the first row.
    number = float(run.steps[run.cause(first)] + (1 - count if first == 0 else 0))
    is_known = not run.is_state and (first or count)
    before = f"step {number:.15g}" if is_known else "the first of them"
    return f"restore a checkpoint from before {before}"


def _rows_not_finite(
    run: _Run, name: str, numbers: Mapping[str, np.ndarray]
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
    is_usual &= rows.sum() <= _SOME * len(rows)
    rows &= ~is_usual
    rows[runs[-1][0] :] |= every[-1]
    return rows


def _count(fields: Fields, field: str) -> np.ndarray:
    """Return the largest count of the norms of a transformation; 0 without counts."""
    return np.max([*fields.get(field, {"": [0.0]}).values()], axis=0)


def _stuck(run: _Run) -> Iterator[_Finding]:
    """Yield that most steps have been skipped lately, or in the whole run."""
    for name, fields in run.names.items():
        if "consecutive" not in fields:
            continue
        skipped = only(fields, "consecutive") > 0
        # A log may lack some of the numbers.
        last = {"norm": np.nan, "threshold": np.nan, "steps": 0, "skipped": np.inf}
        last |= {k: only(fields, k, [0])[-1] for k in (*fields, "nonfinite")}
        in_a_row = int(last["consecutive"])
        tail = skipped & (np.arange(len(skipped)) >= len(skipped) - in_a_row)
        # Steps that are not finite are not skipped for their size.
        large = last["skipped"] - last["nonfinite"]
        is_loss = last.get("loss_threshold", np.inf) < last.get("loss", 0)
        what, limit = ("loss", "loss_threshold") if is_loss else ("norm", "threshold")
        lately = (skipped & ~run.explained)[-_MANY:]
        lately = lately[np.argmax(lately) :]
        if min(in_a_row - np.sum(tail & run.explained), large) >= _STALLED:
            now = f", now with a {what} of {last[what]:.4g} above {last[limit]:.4g}"
            now = now if last[what] > last[limit] else ""
            learn = "raise max_loss" if is_loss else f"use {_RULE}, which learns it"
            yield (
                tail,
                f"{name}: the last {in_a_row} steps were skipped{now}. If this is the"
                f" new level, {learn}.",
            )
        elif lately.sum() >= _STALLED and lately.mean() > 0.5:
            first = len(skipped) - len(lately)
            rows = skipped & ~run.explained & (np.arange(len(skipped)) >= first)
            yield (
                rows,
                f"{name}: {lately.sum()} of the last {len(lately)} steps were skipped:"
                f" {run.named(rows)}. {run.call(rows, first)}",
            )
        elif last["steps"] >= _ENOUGH and np.inf > large >= _OFTEN * last["steps"]:
            yield (
                skipped,
                f"{name}: skipped {percent(float(large / last['steps']))} of"
                f" {last['steps']:.0f} steps. Spikes are rarer: raise max_{what}.",
            )


def _of_loss(run: _Run) -> Iterator[_Finding]:
    """Yield a rise of the loss that lasts, and the losses above their neighbors."""
    found, loss = run.of_loss, run.loss
    if found.rise is not None:
        yield _rise(run, "loss", loss, found)
    rows = found.rows & ~run.explained
    if rows.any():
        i = int(np.argmax(np.where(rows, loss, -np.inf)))
        than = f"usually {found.usual[i]:.4g}"
        if np.nanmin(loss) > 0:
            than = f"{loss[i] / found.usual[i]:.2g} times its running median"
        yield (
            rows,
            f"loss {loss[i]:.4g} in step {run.step(i)}, {than}{_also(run, rows)}."
            f" {run.call(rows, i)}",
        )


def _rise(run: _Run, what: str, series: np.ndarray, found: Outliers) -> _Finding:
    """Return the finding that a series has risen and has not fallen."""
    first = int(found.rise or 0)
    rows, cause = np.arange(len(series)) >= first, run.step(run.cause(first))
    return (
        rows,
        f"{what} rose from {found.usual[first]:.4g} to {np.nanmedian(series[rows]):.4g}"
        f" in step {run.step(first)} and has not fallen. Restore a checkpoint from"
        f" before step {cause}.",
    )


def _also(run: _Run, rows: np.ndarray) -> str:
    steps = f" (steps {run.named(rows)})" if rows.sum() > 1 else ""
    return f"{steps}, skipped" if run.skipped[rows].all() else steps


def _of_norms(run: _Run) -> Iterator[_Finding]:
    """Yield the norms above their neighbors; leaves in the same steps together."""
    for name, found in run.outliers.items():
        norms = {**run.names[name].get("leaf_norm", {}), **run.names[name]["norm"]}
        rise = found[""].rise if "" in found else None
        if rise is not None and run.explained[rise:].mean() < _NEARLY_ALL:
            yield _rise(run, f"{name}: norm", norms[""], found[""])
        times = {
            part: np.where(x.rows, norms[part] / x.usual, 0)
            for part, x in found.items()
            if x.rows.any()
        }
        for part in sorted(times, key=lambda part: (part != "", -times[part].max())):
            rows = (times[part] > 0) & ~run.explained
            for first, end in spans(rows):
                # A graver finding also explains a slow recovery.
                rows[first:end] &= ~run.explained[run.cause(first)]
            if not rows.any():
                continue
            i = int(np.argmax(np.where(rows, times[part], 0)))
            leaves = [p for p in times if p and times[p][i]]
            where = ""
            if leaves and leaves != [part]:
                most = max(leaves, key=lambda p: times[p][i])
                total = len([p for p in found if p])
                where = f", in {len(leaves)} of {total} leaves, most in {most}"
            yield (
                rows,
                f"{name}: norm{f' of {part}' if part else ''} {norms[part][i]:.4g} in"
                f" step {run.step(i)}, {round(times[part][i]):.4g} times its neighbors"
                f"{where}{_also(run, rows)}. {run.call(rows, i)}",
            )


def _of_skipped(run: _Run) -> Iterator[_Finding]:
    """Yield which steps of a history were skipped, except at its start."""
    for name, fields in run.names.items():
        rows = only(fields, "consecutive", run.explained) > 0
        rows = rows & ~run.explained & ~run.start
        if rows.any():
            yield (
                rows,
                f"{name}: skipped {rows.sum()} of {len(rows)} recorded steps:"
                f" {run.named(rows)}. {run.call(rows, int(np.argmax(rows)))}",
            )


def _of_thresholds(run: _Run) -> Iterator[_Finding]:
    """Yield thresholds that follow a spike."""
    for name, fields in run.names.items():
        for part, threshold in fields.get("threshold", {}).items():
            spike = run.outliers[name].get(part)
            for first, end in [] if spike is None else spans(spike.rows)[:1]:
                before = np.median(threshold[max(0, first - _NEAR) : first])
                after = np.max(threshold[first : end + _NEAR])
                if _FOLLOWS * before < after < np.inf and end < len(threshold):
                    rule = "thresholds.zscore(skip_spikes=True)"
                    remedy = f"Use a rule that ignores spikes, such as {rule}"
                    remedy = f"Use {_RULE}" if "skipped" in fields else remedy
                    yield (
                        run.explained & False,
                        f"{name}: the threshold{f' of {part}' if part else ''} rose"
                        f" from {before:.4g} to {after:.4g} after a norm of"
                        f" {fields['norm'][part][first:end].max():.4g}, so later spikes"
                        f" pass. {remedy}.",
                    )


def _of_zeros(run: _Run) -> Iterator[_Finding]:
    """Yield that all norms stay 0."""
    norms = [x for fields in run.names.values() for x in fields["norm"].values()]
    is_positive = np.any(np.array(norms) != 0, axis=0)
    zeros = len(is_positive) - 1 - max(np.flatnonzero(is_positive), default=-1)
    # Rewards are equal in some steps, but a loss that was detached stays so.
    if zeros >= _MANY and np.sum(is_positive) >= _NEARLY_ALL * len(norms[0][:-zeros]):
        yield (
            run.explained & False,
            f"all norms have been 0 since step {run.step(-int(zeros))}, so that nothing"
            f" is learned. {_EXPLAIN} that step.",
        )


def _of_rates(run: _Run) -> Iterator[_Finding]:
    """Yield that clipping shrinks the updates, perhaps for the sake of one leaf."""
    often = [
        name
        for name, fields in run.names.items()
        if "skipped" not in fields
        and max(x[-1] for x in fields.get("rate", {"": [0]}).values()) >= _NEARLY_ALL
    ]
    # The last of several decides the length of the updates.
    for name in often[-1:]:
        fields = run.names[name]
        steps, coefficients = (
            only(fields, "steps", [0]),
            only(fields, "coefficient", []),
        )
        coefficients = np.array(coefficients)[np.isfinite(coefficients)]
        usual = np.median(coefficients) if coefficients.size else 0.0
        # Normalization also lengthens updates, so that its threshold is a length.
        is_length = "" in fields.get("fraction", {}) or np.any(coefficients > 1)
        if steps[-1] < _ENOUGH or is_length or not 0 < usual < _SHRINKS:
            continue
        leaves = fields.get("leaf_norm", {"": [0.0]})
        fractions = fractions_of(np.array([x[-1] for x in leaves.values()]))
        advice = (
            "Unless updates of this length are wanted, raise the threshold:"
            " optclip.suggest chooses one."
        )
        if len(leaves) >= _LEAVES and fractions.max() > _ALONE:
            advice = (
                f"{[*leaves][int(np.argmax(fractions))]} has over 99% of the squared"
                " norm. Clip it separately (over='leaf' or groups)."
            )
        yield (
            run.explained & False,
            f"{name}: clipped in {percent(float(fields['rate'][''][-1]))} of"
            f" {steps[-1]:.0f} steps, usually to {usual:.2g} of the norm. {advice}",
        )


def fractions_of(norms: np.ndarray) -> np.ndarray:
    """Return the fraction of the squared norm that each finite norm has."""
    finite = np.where(np.isfinite(norms), norms, 0.0)
    # Norms are divided by the largest norm, since their squares may overflow.
    squares = (finite / max(finite.max(), np.finfo(float).tiny)) ** 2
    return squares / max(squares.sum(), 1.0)
