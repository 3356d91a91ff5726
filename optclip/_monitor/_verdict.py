"""Say what recorded numbers mean, the gravest first, each with one next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ._not_finite import not_finite
from ._ordered_run import Run, is_of_many, run_of
from ._outliers import spans
from ._run import Fields, only
from ._text import listed, percent

# A fraction of clipped steps from which a verdict is given, if it shrinks the updates
# to this fraction; and the fraction of the squared norm of one of so many leaves.
_NEARLY_ALL, _SHRINKS, _ALONE, _LEAVES = 0.9, 0.1, 0.99, 5
# A fraction of skipped steps that is no longer one of spikes, and the number of
# consecutive ones.
_OFTEN, _STALLED = 0.2, 10
# The least number of steps for a verdict on a rate, and on zeros.
_ENOUGH, _MANY = 20, 100
# A threshold follows a spike if it rises by this factor from the steps before the spike
# to those after it.
_FOLLOWS, _NEAR = 3, 20

# The rule that docs/production_runs.md begins with.
_RULE = "max_norm=scaled(quantile(0.5, window=200), 10.0)"
_WAIT = f"wait if the threshold is learned; otherwise use {_RULE}"
_IGNORES = "a rule that ignores spikes, such as thresholds.zscore(skip_spikes=True)"


# The rows that a finding is about, none if it is about the whole run, and its sentence.
_Finding = tuple[np.ndarray, str]


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
    run, lines = run_of(names, steps, loss), []
    # Each function reads which rows the findings before it explain.
    for findings in (
        not_finite, _stuck, _of_loss, _of_norms, _of_skipped, _of_thresholds,
        _of_zeros, _of_rates,
    ):  # fmt: skip
        for rows, text in findings(run):
            if not rows.any() or (rows & ~run.explained).any():
                lines.append(text)
                # An applied step has consequences in the next one.
                run.explained[:] |= rows
                run.explained[1:] |= (rows & ~run.skipped)[:-1]
    return lines


def _stuck(run: Run) -> Iterator[_Finding]:
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
            advice = "raise max_loss" if is_loss else _WAIT
            limits = only(fields, limit, [0])
            if (first := limits[-min(in_a_row, len(limits))]) < limits[-1]:
                advice = f"wait: the threshold has risen from {first:.4g} since"
            text = f"{name}: the last {in_a_row} steps were skipped{now}."
            for rows, risen in [] if is_loss else _norm_rise(run, name, "The norm"):
                tail, text = tail | rows, f"{text} {risen}"
            yield tail, f"{text} If this is the new level, {advice}."
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


def _of_loss(run: Run) -> Iterator[_Finding]:
    """Yield a rise of the loss that lasts, and the losses above their neighbors."""
    found, loss = run.of_loss, run.loss
    if found.rise:
        yield _rise(run, "loss", found.rise)
    rows = found.rows & ~run.explained
    if rows.any():
        i = int(np.argmax(np.where(rows, loss, -np.inf)))
        times = f"{loss[i] / found.usual[i]:.2g} times its running median"
        than = times if np.nanmin(loss) > 0 else f"usually {found.usual[i]:.4g}"
        yield (
            rows,
            f"loss {loss[i]:.4g} in step {run.step(i)}, {than}{_also(run, rows)}."
            f" {run.call(rows, i)}",
        )


def _rise(run: Run, what: str, rise: tuple[int, float, float], where="") -> _Finding:
    """Return the finding that a series has risen and has not fallen."""
    first, level, last = rise
    # The update of the step before has raised it, or of an earlier one.
    before = run.step(min(run.cause(first), max(first - 1, 0)))
    return (
        np.arange(len(run.steps)) >= first,
        f"{what} rose from {level:.4g} to {last:.4g} since step {run.step(first)}"
        f" and has not fallen{where}. Restore a checkpoint from before step {before}.",
    )


def _norm_rise(run: Run, name: str, what: str) -> Iterator[_Finding]:
    """Yield that a norm has risen, or a leaf with at least half of the largest."""
    fields, found = run.names[name], run.outliers[name]
    rises = {
        p: x.rise for p, x in found.items() if x.rise and not is_of_many(fields, p)
    }
    largest = np.nan_to_num([x.usual[-1] for x in found.values()]).max(initial=0.0)
    leaf = max((p for p in rises if p), key=lambda p: rises[p][2], default="")
    if "" in rises:
        yield _rise(run, what, rises[""], f", most in {leaf}" if leaf else "")
    elif leaf and 2 * rises[leaf][2] >= largest:
        yield _rise(run, f"{what} of {leaf}", rises[leaf])


def _also(run: Run, rows: np.ndarray) -> str:
    steps = f" (steps {run.named(rows)})" if len({*run.steps[rows]}) > 1 else ""
    return f"{steps}, skipped" if run.skipped[rows].all() else steps


def _of_norms(run: Run) -> Iterator[_Finding]:
    """Yield the norms above their neighbors; leaves in the same steps together."""
    rises = [x for name in run.outliers for x in _norm_rise(run, name, f"{name}: norm")]
    # A `skip` comes first, and clipping inside it has the same norms.
    yield from (x for x in rises[:1] if run.explained[x[0]].mean() < _NEARLY_ALL)
    for name, found in run.outliers.items():
        norms = {**run.names[name].get("leaf_norm", {}), **run.names[name]["norm"]}
        of_many = [part for part in found if is_of_many(run.names[name], part)]
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
            if part in of_many:
                where += ", each relative to its threshold"
            yield (
                rows,
                f"{name}: norm{f' of {part}' if part else ''} {norms[part][i]:.4g} in"
                f" step {run.step(i)}, {round(times[part][i]):.4g} times its neighbors"
                f"{where}{_also(run, rows)}. {run.call(rows, i)}",
            )


def _of_skipped(run: Run) -> Iterator[_Finding]:
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


def _of_thresholds(run: Run) -> Iterator[_Finding]:
    """Yield thresholds that follow a spike."""
    for name, fields in run.names.items():
        for part, threshold in fields.get("threshold", {}).items():
            spike = None if is_of_many(fields, part) else run.outliers[name].get(part)
            for first, end in [] if spike is None else spans(spike.rows)[:1]:
                before = np.median(threshold[max(0, first - _NEAR) : first])
                after = np.max(threshold[first : end + _NEAR])
                if _FOLLOWS * before < after < np.inf and end < len(threshold):
                    remedy = _RULE if "skipped" in fields else _IGNORES
                    yield (
                        run.explained & False,
                        f"{name}: the threshold{f' of {part}' if part else ''} rose"
                        f" from {before:.4g} to {after:.4g} after a norm of"
                        f" {fields['norm'][part][first:end].max():.4g}, so later spikes"
                        f" pass. Use {remedy}.",
                    )


def _of_zeros(run: Run) -> Iterator[_Finding]:
    """Yield that all norms stay 0, or those of some leaves."""
    parts = [{**x["norm"], **x.get("leaf_norm", {})} for x in run.names.values()]
    has_norm = [np.any([*norms.values()], axis=0) for norms in parts]
    call = "call optclip.explain with the batch of that step."
    if zeros := _zeros(np.any(has_norm, axis=0)):
        yield (
            run.explained & False,
            f"all norms have been 0 since step {run.step(-zeros)}, so that nothing is"
            f" learned. {call.capitalize()}",
        )
    ran = np.flatnonzero(np.all(has_norm, axis=0))
    counts = {p: _zeros(x[ran]) for norms in parts for p, x in norms.items()}
    # A frozen leaf has no other norms.
    dead = {part: x for part, x in counts.items() if 0 < x < len(ran)}
    if dead:
        yield (
            run.explained & False,
            f"the norm of {listed([*dead])} has been 0 since step"
            f" {run.step(ran[-max(dead.values())])}. If it is not frozen, {call}",
        )


def _zeros(numbers: np.ndarray) -> int:
    """Return how many of the last numbers are 0, if they are many, unlike others."""
    zeros = len(numbers) - 1 - int(max(np.flatnonzero(numbers), default=-1))
    # Rewards are equal in some steps, but a loss that was detached stays so.
    before = numbers[: len(numbers) - zeros]
    is_new = np.sum(before != 0) >= _NEARLY_ALL * len(before)
    return zeros if is_new and zeros >= _MANY else 0


def _of_rates(run: Run) -> Iterator[_Finding]:
    """Yield that clipping shrinks the updates, perhaps for the sake of one leaf."""
    clips = [
        name
        for name, fields in run.names.items()
        if "skipped" not in fields
        and max(x[-1] for x in fields.get("rate", {"": [0]}).values()) >= _NEARLY_ALL
    ]
    # The last of several decides the length of the updates.
    for name in clips[-1:]:
        fields = run.names[name]
        steps = only(fields, "steps", [0])
        norms, coefficients = (
            np.asarray(only(fields, x, [np.nan])) for x in ("norm", "coefficient")
        )
        is_usual = np.isfinite(norms) & (norms > 0) & np.isfinite(coefficients)
        usual = np.median(coefficients[is_usual]) if is_usual.any() else 1.0
        # Normalization also lengthens updates, so that its threshold is a length.
        is_length = "" in fields.get("fraction", {}) or np.any(coefficients > 1)
        if steps[-1] < _ENOUGH or is_length or usual >= _SHRINKS:
            continue
        leaves = fields.get("leaf_norm", {"": norms})
        sizes = [np.median(x[is_usual]) for x in leaves.values()]
        fractions = fractions_of(np.array(sizes))
        advice = (
            "Unless updates of this length are wanted, raise the threshold:"
            " optclip.suggest chooses one."
        )
        if len(leaves) >= _LEAVES and fractions.max() > _ALONE:
            advice = (
                f"{[*leaves][int(np.argmax(fractions))]} has over 99% of the squared"
                " norm. Clip it separately (over='leaf' or groups)."
            )
        often = "in the last one" if run.is_state else "usually"
        yield (
            run.explained & False,
            f"{name}: clipped in {percent(float(fields['rate'][''][-1]))} of"
            f" {steps[-1]:.0f} steps, {often} to {usual:.2g} of the norm. {advice}",
        )


def fractions_of(norms: np.ndarray) -> np.ndarray:
    """Return the fraction of the squared norm that each finite norm has."""
    finite = np.where(np.isfinite(norms), norms, 0.0)
    # Norms are divided by the largest norm, since their squares may overflow.
    squares = (finite / max(finite.max(), np.finfo(float).tiny)) ** 2
    return squares / max(squares.sum(), 1.0)
