"""Say what recorded numbers mean, the gravest first, each with one next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ._metrics import percent
from ._outliers import Outliers, is_regular, outliers, spans
from ._run import Fields, at, has_run, only

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

_CALL = "Call optclip.explain with the batch of that step."
_APPLIED = (
    "; the step was applied: the parameters are probably NaN. Restore a checkpoint from"
    " before {}, and wrap the optimizer in optclip.skip."
)


class _Finding(NamedTuple):
    """Hold a sentence, and the rows it is about: none, if about the whole run."""

    rows: np.ndarray
    text: str


class _Run(NamedTuple):
    """Hold the recorded steps.

    Attributes:
      names: The transformations, `skip` first, since it records all steps.
      steps: Number of each row.
      is_state: Whether there is one row, of a state.
      loss: Loss of each row, NaN without one; None if no row has one.
      has_start: Whether the first row is at the start of the run.
      is_run: For each transformation, whether it ran in each row.
      outliers: For each transformation, what stands out in each of its norms.
      skipped: Whether a `skip` skipped each row.
      explained: Whether a graver finding explains each row.
    """

    names: Mapping[str, Fields]
    steps: np.ndarray
    is_state: bool
    loss: np.ndarray | None
    has_start: bool
    is_run: Mapping[str, np.ndarray]
    outliers: Mapping[str, Mapping[str, Outliers]]
    skipped: np.ndarray
    explained: np.ndarray

    @property
    def start(self) -> np.ndarray:
        """The rows of the start of the run, its first tenth."""
        rows = np.arange(len(self.explained))
        return (10 * rows < len(rows)) & self.has_start

    def named(self, rows: np.ndarray) -> str:
        """Return the numbers of some rows as text."""
        ends = [(self.steps[i], self.steps[j - 1]) for i, j in spans(rows)]
        words = [
            f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"
            for first, last in ends[: _NAMED + 1]
        ]
        return ", ".join([*words[:_NAMED], *["..."][: len(words) - _NAMED]])


def verdicts(
    names: Mapping[str, Fields],
    steps: np.ndarray | None,
    loss: np.ndarray | None = None,
) -> list[str]:
    """Return a line for each finding in the metrics of one step or more, oldest first.

    Args:
      names: The transformations, with an array over the steps for each number.
      steps: The recorded steps of a history; None for the metrics of one step.
      loss: The loss of each step, NaN where it is not known; None without losses.
    """
    if not names:
        return []
    run, lines = _run_of(names, steps, loss), []
    # Each function reads which rows the findings before it explain.
    for findings in [
        _not_finite, _stuck,
        *([] if steps is None else [_of_loss, _of_norms, _of_skipped, _of_thresholds]),
        _of_rates,
    ]:  # fmt: skip
        for rows, text in findings(run):
            if not rows.any() or (rows & ~run.explained).any():
                lines.append(f"-> {text}")
                run.explained[:] |= np.convolve(rows, [1, 1, 1])[1:-1] > 0
    return lines


def _run_of(
    names: Mapping[str, Fields], steps: np.ndarray | None, loss: np.ndarray | None
) -> _Run:
    names = dict(sorted(names.items(), key=lambda item: "skipped" not in item[1]))
    if loss is None:
        losses = [only(fields, "loss") for fields in names.values()]
        loss = next((x for x in losses if x is not None), None)
    if steps is not None and np.any(np.diff(steps) < 0):
        # A run that returned to a checkpoint has abandoned its steps after it.
        returns = np.where(np.diff(steps) < 0, steps[1:], np.inf)
        limits = np.minimum.accumulate(returns[::-1])[::-1]
        is_kept = np.append(steps[:-1] < limits, True)
        names = {name: at(fields, is_kept) for name, fields in names.items()}
        steps, loss = steps[is_kept], None if loss is None else loss[is_kept]
    is_run = {name: has_run(names, name) for name in names}
    none = np.zeros(len(next(iter(is_run.values()))), bool)
    skips = [only(fields, "consecutive", none) for fields in names.values()]
    # The first step of a log depends on how often it has one.
    is_state, steps = steps is None, np.zeros(1) if steps is None else steps
    has_start = bool(steps[0] <= 1 + 2 * np.median([0, *np.diff(steps[:9])]))
    found = {
        name: {} if is_state else _outliers_of(fields, is_run[name], has_start)
        for name, fields in names.items()
    }
    skipped = np.any(np.array(skips) > 0, axis=0)
    return _Run(
        names, steps, is_state, loss, has_start, is_run, found, skipped, none
    )  # fmt: skip


def _outliers_of(
    fields: Fields, is_run: np.ndarray, has_start: bool
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
                found[part] = outliers(x, is_loss=False, has_start=has_start)
    return found


def _not_finite(run: _Run) -> Iterator[_Finding]:
    """Yield the steps that are not finite, those first that were applied."""
    findings = []
    for name, fields in run.names.items():
        norms = {**fields["norm"], **fields.get("leaf_norm", {})}
        norms = {p: np.where(run.is_run[name], x, 0) for p, x in norms.items()}
        coefficients = [*fields.get("coefficient", {"": run.explained}).values()]
        is_applied = np.isnan(coefficients).any(axis=0) & ~run.skipped
        findings += _not_finite_of(run, name, norms, is_applied)
    if run.loss is not None and not run.is_state:
        # A loss of NaN is none in this step.
        losses = {"": np.where(np.isnan(run.loss), 0, run.loss)}
        findings += _not_finite_of(run, "loss", losses, run.explained)
    yield from sorted(findings, key=lambda finding: _APPLIED[:25] not in finding.text)


def _not_finite_of(
    run: _Run, name: str, numbers: Mapping[str, np.ndarray], is_applied: np.ndarray
) -> list[_Finding]:
    """Return the steps of one transformation, or of the loss, that are not finite."""
    fields, rows = run.names.get(name, {}), _rows_not_finite(run, name, numbers)
    count, steps = (_count(fields, x) for x in ("nonfinite", "steps"))
    number, of = (count[-1], steps[-1]) if run.is_state else (rows.sum(), len(rows))
    is_often = run.is_state and of >= _ENOUGH and number > _SOME * of
    if not rows.any() and not is_often:
        return []
    first, end = spans(rows)[-1] if rows.any() else (0, 0)
    is_since = bool(rows[-1]) and 2 * (end - first) >= rows.sum()
    is_all = is_since and first == 0 and count[0] >= steps[0] > 0
    text = f"{name}: not finite in {number:.0f} of {of:.0f} steps"
    if is_since and (is_all or not run.is_state):
        is_earlier = first == 0 and not is_all and not run.has_start
        text += f", since step {0 if is_all else run.steps[first]:.0f}"
        text += ", or earlier" if is_earlier else ""
    elif run.is_state and rows[-1]:
        text = f"{text}, also in the last one" if of else f"{name}: not finite"
    elif not run.is_state:
        text += f": {run.named(rows)}"
    leaves = [part for part in numbers if part]
    row = first if is_since else int(np.argmax(rows))
    bad = [part for part in leaves if not np.isfinite(numbers[part][row])]
    if 0 < len(bad) < len(leaves):
        text += f", first in {', '.join(bad[:_NAMED])}"
    # A run that went on after such a step has not applied it.
    is_fatal = rows[-1] and (len(spans(rows)) == 1 or end - first >= _STALLED)
    applied = rows & is_applied & (np.arange(len(rows)) >= first)
    if is_fatal and applied.any():
        step = f"step {run.steps[np.argmax(applied)]:.0f}"
        text += _APPLIED.format("it" if run.is_state else step)
    elif "skipped" in fields or (run.skipped | ~rows).all():
        text += f". None was applied. {_CALL}"
    elif is_since and not run.is_state:
        text += ". If the parameters are not finite, restore a checkpoint from before."
    else:
        text += f". {_CALL}"
    return [_Finding(rows, text)]


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
    is_usual |= is_regular([first for first, _ in runs])
    is_usual |= len(runs) > _FEW and not np.isnan([*numbers.values()]).any()
    is_usual &= max((j - i for i, j in spans(rows)), default=0) <= _RETRIES
    is_usual &= rows.sum() <= _SOME * len(rows)
    return rows & ~is_usual


def _count(fields: Fields, field: str) -> np.ndarray:
    """Return the largest count of the norms of a transformation; 0 without counts."""
    return np.max([*fields.get(field, {"": [0.0]}).values()], axis=0)


def _stuck(run: _Run) -> Iterator[_Finding]:
    """Yield that most steps have been skipped lately, or in the whole run."""
    for name, fields in run.names.items():
        consecutive = only(fields, "consecutive")
        if consecutive is None:
            continue
        # A log may lack some of the numbers.
        last = {"norm": np.nan, "threshold": np.nan, "steps": 0, "skipped": 0}
        last |= {k: only(fields, k, [0])[-1] for k in (*fields, "nonfinite")}
        rows, in_a_row = consecutive > 0, last["consecutive"]
        lately = rows[-_MANY:]
        lately = lately[np.argmax(lately) :]
        is_loss = last.get("loss_threshold", np.inf) < last.get("loss", 0)
        what, limit = ("loss", "loss_threshold") if is_loss else ("norm", "threshold")
        raised = f"raise max_{what}"
        if in_a_row >= _STALLED:
            rows[: max(0, len(rows) - int(in_a_row))] = False
            yield _Finding(
                rows,
                f"{name}: the last {in_a_row:.0f} steps were skipped, now with a {what}"
                f" of {last[what]:.4g} above {last[limit]:.4g}. If this is its new"
                f" level, {raised}, or set max_consecutive.",
            )
        elif lately.sum() >= _STALLED and lately.mean() > 0.5:
            yield _Finding(
                rows,
                f"{name}: {lately.sum()} of the last {len(lately)} steps were skipped."
                f" {_CALL}",
            )
        elif last["steps"] >= _ENOUGH:
            # Steps that are not finite are not skipped for their size.
            rate = (last["skipped"] - last["nonfinite"]) / last["steps"]
            if rate >= _OFTEN:
                yield _Finding(
                    rows,
                    f"{name}: skipped {percent(float(rate))} of {last['steps']:.0f}"
                    f" steps. Spikes are rarer: {raised}.",
                )


def _of_loss(run: _Run) -> Iterator[_Finding]:
    """Yield a rise of the loss that lasts, and the losses above their neighbors."""
    if run.loss is None:
        return
    loss = np.where(np.isinf(run.loss), np.nan, run.loss)
    found = outliers(loss, is_loss=True, has_start=run.has_start)
    if found.rise is not None:
        rows = np.arange(len(loss)) >= found.rise
        yield _Finding(
            rows,
            f"loss rose from {found.usual[found.rise]:.4g} to"
            f" {np.nanmedian(loss[rows]):.4g} in step {run.steps[found.rise]:.0f} and"
            " has stayed there. Restore a checkpoint from before it.",
        )
    rows = found.rows & ~run.explained
    if rows.any():
        i = int(np.argmax(np.where(rows, loss, -np.inf)))
        than = f"usually {found.usual[i]:.4g}"
        if np.nanmin(loss) > 0:
            than = f"{loss[i] / found.usual[i]:.2g} times its running median"
        yield _Finding(
            rows,
            f"loss {loss[i]:.4g} in step {run.steps[i]:.0f}, {than}"
            f"{_also(run, rows)}. {_CALL}",
        )


def _also(run: _Run, rows: np.ndarray) -> str:
    steps = f" (steps {run.named(rows)})" if rows.sum() > 1 else ""
    return f"{steps}, skipped" if run.skipped[rows].all() else steps


def _of_norms(run: _Run) -> Iterator[_Finding]:
    """Yield the norms above their neighbors; leaves in the same steps together."""
    for name, found in run.outliers.items():
        norms = {**run.names[name].get("leaf_norm", {}), **run.names[name]["norm"]}
        rise = found[""].rise if "" in found else None
        if rise is not None:
            rows = np.arange(len(run.steps)) >= rise
            yield _Finding(
                rows,
                f"{name}: norm rose from {found[''].usual[rise]:.4g} to"
                f" {np.nanmedian(norms[''][rows]):.4g} since step {run.steps[rise]:.0f}"
                " and has not fallen. Restore a checkpoint from before it.",
            )
        times = {
            part: np.where(x.rows, norms[part] / x.usual, 0)
            for part, x in found.items()
            if x.rows.any()
        }
        for part in sorted(times, key=lambda part: (part != "", -times[part].max())):
            rows = (times[part] > 0) & ~run.explained
            if not rows.any():
                continue
            i = int(np.argmax(np.where(rows, times[part], 0)))
            leaves = {p: times[p][rows].max() for p in times if p}
            leaves = [p for p in leaves if leaves[p]]
            where = ""
            if leaves and leaves != [part]:
                most = max(leaves, key=lambda p: times[p][rows].max())
                total = len([p for p in found if p])
                where = f", in {len(leaves)} of {total} leaves, most in {most}"
            yield _Finding(
                rows,
                f"{name}: norm{f' of {part}' if part else ''} {norms[part][i]:.4g} in"
                f" step {run.steps[i]:.0f}, {times[part][i]:.0f} times its neighbors"
                f"{_also(run, rows)}{where}. {_CALL}",
            )


def _of_skipped(run: _Run) -> Iterator[_Finding]:
    """Yield which steps of a history were skipped, except at its start."""
    for name, fields in run.names.items():
        consecutive = only(fields, "consecutive", run.explained)
        rows = (consecutive > 0) & ~run.explained & ~run.start
        if "consecutive" in fields and rows.any():
            yield _Finding(
                rows,
                f"{name}: skipped {rows.sum()} of {len(rows)} recorded steps:"
                f" {run.named(rows)}. {_CALL}",
            )


def _of_thresholds(run: _Run) -> Iterator[_Finding]:
    """Yield thresholds that follow a spike, and norms that stay 0."""
    for name, fields in run.names.items():
        for part, threshold in fields.get("threshold", {}).items():
            spike = run.outliers[name].get(part)
            for first, end in [] if spike is None else spans(spike.rows)[:1]:
                before = np.median(threshold[max(0, first - _NEAR) : first])
                after = np.max(threshold[first : end + _NEAR])
                if _FOLLOWS * before < after < np.inf and end < len(threshold):
                    remedy = "Use a rule that ignores spikes, such as"
                    remedy += " thresholds.zscore(skip_spikes=True)"
                    if "skipped" in fields:
                        remedy = "Pass learn_skipped=False"
                    yield _Finding(
                        run.explained & False,
                        f"{name}: the threshold{f' of {part}' if part else ''} rose"
                        f" from {before:.4g} to {after:.4g} after a norm of"
                        f" {fields['norm'][part][first:end].max():.4g}, so later spikes"
                        f" pass. {remedy}.",
                    )
    norms = [x for fields in run.names.values() for x in fields["norm"].values()]
    is_positive = np.any(np.array(norms) != 0, axis=0)
    zeros = len(is_positive) - 1 - max(np.flatnonzero(is_positive), default=-1)
    # Rewards are equal in some steps, but a loss that was detached stays so.
    if zeros >= _MANY and np.sum(is_positive) >= _NEARLY_ALL * len(norms[0][:-zeros]):
        yield _Finding(
            run.explained & False,
            f"all norms have been 0 since step {run.steps[-zeros]:.0f}, so that nothing"
            f" is learned. {_CALL}",
        )


def _of_rates(run: _Run) -> Iterator[_Finding]:
    """Yield that clipping shrinks the updates, perhaps for the sake of one leaf."""
    often = [
        name
        for name, fields in run.names.items()
        if np.max([x[-1] for x in fields.get("rate", {"": [0]}).values()])
        >= _NEARLY_ALL
        and "skipped" not in fields
    ]
    # The last of several decides the length of the updates.
    for name in often[-1:]:
        fields = run.names[name]
        steps, coefficients = (only(fields, x, [0]) for x in ("steps", "coefficient"))
        coefficients = np.array(coefficients)[np.isfinite(coefficients)]
        usual = np.median(coefficients) if coefficients.size else 0.0
        # Normalization also lengthens updates, so that its threshold is a length.
        is_length = "" in fields.get("fraction", {}) or np.any(coefficients > 1)
        if steps[-1] < _ENOUGH or is_length or not 0 < usual < _SHRINKS:
            continue
        leaves = fields.get("leaf_norm", {"": [0.0]})
        fractions = fractions_of(np.array([x[-1] for x in leaves.values()]))
        advice = "Unless updates of this length are wanted, raise the threshold:"
        advice += " optclip.suggest chooses one."
        if len(leaves) >= _LEAVES and fractions.max() > _ALONE:
            advice = (
                f"{[*leaves][int(np.argmax(fractions))]} has over 99% of the squared"
            )
            advice += " norm. Clip it separately (over='leaf' or groups)."
        yield _Finding(
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
