"""Say what recorded numbers mean, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ._metrics import percent
from ._run import Fields, only

# A fraction of steps, and of the squared norm, from which a verdict is given.
_NEARLY_ALL, _MOST = 0.9, 0.5
# A fraction of skipped steps that is no longer one of spikes.
_OFTEN = 0.2
# The least number of steps for a verdict on a rate, and on a threshold without effect.
_ENOUGH, _MANY = 20, 100
# A smaller coefficient makes updates of a usual size smaller than the eps of Adam.
_TINY = 1e-6
# The number of consecutive skipped steps that is no longer a spike, and of runs of
# skipped steps that are named.
_STALLED, _NAMED = 10, 5
# A spike is this many times the median norm. A threshold follows spikes if it rises by
# this factor from the steps before one to those after it.
_SPIKE, _FOLLOWS, _NEAR = 10, 3, 20


def verdicts(names: Mapping[str, Fields], steps: np.ndarray | None) -> list[str]:
    """Return a line for each finding in the metrics of one step or more, oldest first.

    Args:
      names: The transformations, with an array over the steps for each number, without
        skipped steps.
      steps: The recorded steps of a history; None for the metrics of one step.
    """
    lines = []
    for name, fields in names.items():
        findings = [*_of_clip(fields)] if [*fields["norm"]] == [""] else []
        findings += _of_skip(fields)
        findings += [] if steps is None else _of_skipped_steps(fields, steps)
        findings += [] if steps is None else _of_spike(fields, steps)
        findings += _of_parts({k: x for k, x in fields["norm"].items() if k})
        findings += _of_parts(fields.get("leaf_norm", {}), are_leaves=True)
        lines += [f"-> {name}: {finding}" for finding in findings]
    return lines


def _of_clip(fields: Fields) -> Iterator[str]:
    """Yield the findings about one norm and its threshold."""
    nothing = np.array([np.nan])
    last = {
        field: float(only(fields, field, nothing)[-1])
        for field in ("threshold", "coefficient", "rate", "steps")
    }
    steps, rate, coefficient = last["steps"], last["rate"], last["coefficient"]
    coefficients = only(fields, "coefficient", nothing)
    is_skip = "skipped" in fields
    of_one = only(fields, "fraction") is None
    # Normalization also lengthens updates, so its threshold is a length.
    of_one = of_one and not np.any(coefficients > 1)
    if not is_skip and of_one and steps >= _ENOUGH and rate >= _NEARLY_ALL:
        yield (
            f"clipped in {percent(rate)} of {steps:.0f} steps, so the effective"
            " learning rate is the rate times the coefficient,"
            f" {coefficient:.2g} in the last step. Adam changes little by this; with"
            " other optimizers raise the threshold, which optclip.suggest chooses."
        )
    usual = float(np.median(coefficients))
    # A single spike may have such a coefficient too.
    if not is_skip and rate >= _NEARLY_ALL and 0 < usual < _TINY:
        yield (
            f"the coefficient {usual:.2g} makes updates smaller than the eps of"
            " Adam, so that nothing is learned. Raise the threshold, or find the cause"
            " of the norm."
        )
    if not is_skip and steps >= _MANY and rate == 0 and np.isfinite(last["threshold"]):
        yield (
            f"no step of {steps:.0f} exceeded the threshold {last['threshold']:.4g}. It"
            " affects spikes only."
        )
    yield from _of_threshold(fields, is_skip=is_skip)


def _of_threshold(fields: Fields, *, is_skip: bool) -> Iterator[str]:
    """Yield the findings about a threshold that changes over the steps."""
    norm, threshold = (only(fields, field) for field in ("norm", "threshold"))
    if norm is None or threshold is None:
        return
    is_set = np.isfinite(threshold)
    norm, threshold = norm[is_set], threshold[is_set]
    if len(norm) < _ENOUGH:
        return
    for spike, before, after in _rises(norm, threshold):
        remedy = (
            "Pass learn_skipped=False"
            if is_skip
            else "Use a rule that ignores spikes, such as"
            " thresholds.zscore(skip_spikes=True)"
        )
        yield (
            f"the threshold rose from {before:.4g} to {after:.4g} after a norm of"
            f" {spike:.4g}, so later spikes pass. {remedy}, or a longer window."
        )
        break
    changes = np.flatnonzero(np.diff(threshold))
    unchanged = len(threshold) - 1 - (changes[-1] + 1) if len(changes) else 0
    recent = norm[len(norm) - unchanged :]
    # A schedule that has ended is constant too.
    is_idle = (recent == 0) | ~np.isfinite(recent)
    if unchanged >= _MANY and np.mean(is_idle) >= _NEARLY_ALL:
        yield (
            f"the threshold has been {threshold[-1]:.4g} for {unchanged} steps, after"
            " it changed before, since norms are 0 or not finite: the rule has stopped"
            " learning."
        )


def _of_spike(fields: Fields, steps: np.ndarray) -> Iterator[str]:
    """Yield the step of the largest norm of a history."""
    norm = only(fields, "norm")
    # A transformation inside `skip` has fewer norms, and `skip` records the spike.
    if norm is None or len(norm) < max(_ENOUGH, len(steps)):
        return
    finite = np.where(np.isfinite(norm), norm, 0)
    at, median = int(np.argmax(finite)), float(np.median(finite))
    if finite[at] > _SPIKE * median > 0:
        yield (
            f"the largest norm, {norm[at]:.4g}, was {norm[at] / median:.0f} times the"
            f" median, in step {steps[at]:.0f}. optclip.explain finds its cause in the"
            " batch of that step."
        )


def _rises(
    norm: np.ndarray, threshold: np.ndarray
) -> Iterator[tuple[float, float, float]]:
    """Yield each spike that the threshold follows, and the thresholds around it."""
    usual = norm[(norm > 0) & (norm < np.inf)]
    level = _SPIKE * np.median(usual) if usual.size else np.inf
    for at in np.flatnonzero((norm > level) & (norm < np.inf)):
        later = norm[at + 1 :]
        # A lasting shift is no spike, and a schedule rises more slowly.
        if at == 0 or not len(later) or np.mean(later <= level / 2) <= _MOST:
            continue
        before = float(np.median(threshold[max(0, at - _NEAR) : at]))
        after = float(np.max(threshold[at : at + _NEAR]))
        if after > _FOLLOWS * before:
            yield float(norm[at]), before, after


def _of_skip(fields: Fields) -> Iterator[str]:
    """Yield the findings about skipped steps."""
    consecutive = only(fields, "consecutive")
    if consecutive is None:
        return
    lately = consecutive[-_MANY:] > 0
    first = int(np.argmax(lately))
    since = lately[first:]
    if (
        consecutive[-1] < _STALLED
        and np.sum(since) >= _STALLED
        and np.mean(since) > 0.5
    ):
        yield (
            f"{np.sum(since)} of the last {len(since)} steps were skipped. The"
            " parameters or the data may be damaged: call optclip.explain, or restore a"
            " checkpoint."
        )
    nothing = np.array([0])
    rate, steps = (only(fields, x, nothing)[-1] for x in ("rate", "steps"))
    if consecutive[-1] < _STALLED and steps >= _ENOUGH and rate >= _OFTEN:
        yield (
            f"skipped {percent(float(rate))} of {steps:.0f} steps. Spikes are rarer:"
            " raise the threshold, or let the rule follow a lasting change with"
            " learn_skipped=True."
        )
    if consecutive[-1] >= _STALLED:
        yield (
            f"the last {consecutive[-1]:.0f} steps were skipped. If the parameters are"
            " finite, the level of the norms or losses has shifted: raise the threshold"
            " or set max_consecutive. If not, restore a checkpoint."
        )


def _of_skipped_steps(fields: Fields, steps: np.ndarray) -> Iterator[str]:
    """Yield which steps of a history were skipped."""
    consecutive = only(fields, "consecutive")
    if consecutive is None or len(consecutive) != len(steps):
        return
    is_skipped = np.concatenate([[False], consecutive > 0, [False]])
    starts = np.flatnonzero(is_skipped[1:] & ~is_skipped[:-1])
    ends = np.flatnonzero(is_skipped[:-1] & ~is_skipped[1:]) - 1
    runs = [
        f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"
        for first, last in zip(steps[starts], steps[ends], strict=True)
    ]
    if not runs:
        return
    named = f"{', '.join(runs[:_NAMED])}{', ...' if len(runs) > _NAMED else ''}"
    yield (
        f"skipped {np.sum(consecutive > 0)} of {len(steps)} recorded steps: {named}."
        " optclip.explain finds the cause in the batch of such a step."
    )


def _of_parts(
    arrays: Mapping[str, np.ndarray], *, are_leaves: bool = False
) -> Iterator[str]:
    """Yield the findings about the norms of leaves or groups."""
    parts, norms = [*arrays], np.array([x[-1] for x in arrays.values()])
    if len(norms) < 2:
        return
    bad = [part for part, x in zip(parts, norms, strict=True) if not np.isfinite(x)]
    if bad and len(bad) < len(parts):
        yield f"not finite in the last step: {', '.join(bad[:5])}."
    fractions = fractions_of(norms)
    largest = int(np.argmax(fractions))
    fraction = fractions[largest]
    # Leaves that are clipped by their own norms do not scale each other.
    if are_leaves and not bad and fraction > _NEARLY_ALL:
        yield (
            f"{parts[largest]} has {percent(fraction)} of the squared norm in the last"
            " step, so it alone decides whether the norm exceeds the threshold. Clip it"
            " separately (over='leaf' or groups), or find its cause with"
            " optclip.explain."
        )


def fractions_of(norms: np.ndarray) -> np.ndarray:
    """Return the fraction of the squared norm that each finite norm has."""
    finite = np.where(np.isfinite(norms), norms, 0.0)
    # Norms are divided by the largest norm, since their squares may overflow.
    squares = (finite / max(finite.max(), np.finfo(float).tiny)) ** 2
    return squares / max(squares.sum(), 1.0)
