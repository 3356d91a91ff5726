"""Summarize clipping records as text for a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._arrays import _validate
from .._typing import PyTree
from ._history import history
from ._metrics import PROBE_FIELDS, metrics
from ._run import (
    Fields,
    at,
    clips_in,
    fields_by_name,
    keys_of_metrics,
    only,
    read,
    without_skipped,
)
from ._text import percent, wrapped
from ._verdict import fractions_of, verdicts


def summary(opt_state: PyTree, *, most: int = 10) -> str:
    """Summarize the last step and the clipping rate of each transformation as text.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> clip = optclip.clip_by_global_norm(1.0, record="leaves")
      >>> tx = optax.chain(clip, optax.sgd(0.1))
      >>> updates = {"bias": jnp.array([3.0]), "kernel": jnp.array([[4.0]])}
      >>> print(optclip.summary(tx.update(updates, tx.init(updates))[1]))
      clip: norm 5, threshold 1, coefficient 0.2, clipped in 100% of 1 step
          64%  4         kernel
          36%  3         bias

    Args:
      opt_state: State of an optimizer, or the output of `metrics` or of `history`. The
        last step is summarized; of transformations inside `skip`, the last step taken.
        The findings cover all rows of a history, also of one inside the state.
      most: Number of groups or leaves listed per transformation, non-finite norms
        first, then the largest. Default: 10.

    Returns:
      Text. The columns of a group or leaf are its percentage of the sum of squared
      norms, its norm, its name, and how often it was clipped or non-finite. "Up to"
      precedes the largest rate of several norms. The last lines, which begin with `->`,
      are the findings, the gravest first: steps that are not finite or skipped, the
      loss, spikes, thresholds, rates. All lines but rows of tables have at most 80
      characters. "No step yet" during training means that the loop drops the new state.
      Index the state of an ensemble first: `jax.tree.map(lambda x: x[0], state)`.

    Raises:
      TypeError: Called inside `jax.jit`, or `opt_state` is a list of metrics.
      ValueError: The state contains no record.
    """
    lines, findings = summarized(opt_state, _validate.length("most", most))
    return wrapped("\n".join([*lines, *(f"-> {finding}" for finding in findings)]))


def summarized(opt_state: PyTree, most: int = 10) -> tuple[list[str], list[str]]:
    """Return the lines on the last step, and the findings."""
    steps = loss = None
    if isinstance(opt_state, Mapping) and np.ndim(opt_state.get("step", 0)) == 1:
        every, steps, loss = _rows(opt_state)
        names = without_skipped(every)
    else:
        numbers = _metrics_in(opt_state)
        names = every = fields_by_name({k: np.array([x]) for k, x in numbers.items()})
        with contextlib.suppress(ValueError):  # The state has no history, or no row.
            columns = history(opt_state)
            if len(columns["step"]) and columns.keys() >= numbers.keys():
                every, steps, loss = _rows(columns)
    last = {name: at(fields, -1) for name, fields in names.items()}
    clips = clips_in(names)
    lines = []
    for name in clips:
        first, *table = _lines_of(name, last[name], most)
        # `skip` and the clipping inside it usually have the same leaves.
        lines += [first] if {*table} <= {*lines} else [first, *table]
    lines += [
        _line_of_cotangents(name, fields)
        for name, fields in last.items()
        if PROBE_FIELDS[0] in fields
    ]
    return lines, verdicts({name: every[name] for name in clips}, steps, loss)


def _rows(
    history: Mapping[str, Any],
) -> tuple[dict[str, Fields], np.ndarray, np.ndarray | None]:
    """Return the numbers, the steps and the loss of all rows of a history."""
    columns = read(history)
    return fields_by_name(columns), columns["step"], columns.get("loss")


def _lines_of(name: str, fields: Fields, most: int) -> list[str]:
    """Return the lines of one transformation: its norms, then its groups or leaves."""
    if only(fields, "steps") == 0:
        return [f"{name}: no step yet"]
    thresholds = [*fields.get("threshold", {}).values()]
    if thresholds and np.isnan(thresholds).all():
        return [f"{name}: skipped in all recorded steps"]
    lines = [f"{name}: {', '.join(_phrases(fields))}"]
    for field in ("norm", "leaf_norm"):
        if [*fields.get(field, {})] not in ([], [""]):
            lines += _lines_of_parts(fields, field, most)
    return lines


def _metrics_in(state: PyTree) -> dict[str, float]:
    """Return the metrics of a state, or the metrics that were passed."""
    if isinstance(state, Mapping):
        names = fields_by_name(state)
        if any({"norm", PROBE_FIELDS[0]} & fields.keys() for fields in names.values()):
            return {key: _number(key, state[key]) for key in keys_of_metrics(state)}
    is_list = isinstance(state, list) and state and isinstance(state[-1], Mapping)
    if is_list and keys_of_metrics(state[-1]):
        raise TypeError(
            "`opt_state` must hold one step, got a list of dicts, which is a history."
            " Pass one step, such as history[-1], or for the findings of all steps the"
            " dict of arrays that optclip.history(opt_state) returns."
        )
    return {key: _number(key, x) for key, x in metrics(state).items()}


def _number(key: str, value: Any) -> float:
    advice = "Return optclip.metrics(state) from the jitted step and pass that."
    _validate.outside_jit("opt_state", value, advice)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        advice = (
            "Pass the state or the metrics of one step, and of one member of an"
            " ensemble. The metrics of many steps need the key 'step'."
        )
        raise TypeError(
            _validate.must_be(f"`opt_state` at {key!r}", "a number", value, advice)
        ) from error


def _phrases(fields: Fields) -> list[str]:
    """Return the phrases of a line; of several parts, the largest values."""
    parts = [*fields["norm"]]

    def most(field: str) -> float | None:
        numbers = fields.get(field, {})
        return max((numbers[part] for part in parts if part in numbers), default=None)

    phrases = ["1 norm" if len(parts) == 1 else f"{len(parts)} norms"]
    fraction, rate, nonfinite = map(most, ("fraction", "rate", "nonfinite"))
    of_many = parts == [""] and fraction is not None
    up_to = "up to " if len(parts) > 1 and (rate or nonfinite) else ""
    if parts == [""]:
        # Of several norms, the record has the one that exceeds its threshold most.
        values = ((word, most(word)) for word in ("norm", "threshold", "coefficient"))
        phrases = [f"{word} {value:.4g}" for word, value in values if value is not None]
        phrases[0] = f"{'most clipped ' if of_many else ''}{phrases[0]}"
    if of_many and fraction is not None:
        phrases.append(f"{percent(fraction)} of the norms clipped in the last step")
    skipped, count = only(fields, "skipped"), only(fields, "steps")
    # Metrics logged by older versions have no count.
    steps = f"{count:.0f} step{'' if count == 1 else 's'}" if count else "the steps"
    if rate is not None and skipped is None:
        subject = "at least one" if of_many else "clipped"
        clipped = f"{subject} in {up_to}{percent(rate)} of"
        phrases.append(f"{clipped if rate or not of_many else 'none in'} {steps}")
    if nonfinite:
        phrases.append(f"not finite in {up_to}{nonfinite:.0f}")
    if skipped is not None:
        if (loss := only(fields, "loss")) is not None:
            limit = only(fields, "loss_threshold")
            phrases.append(f"loss {loss:.4g}, its threshold {limit:.4g}")
        phrases.append(f"skipped {skipped:.0f} of {steps}")
    return phrases


def _lines_of_parts(fields: Fields, field: str, most: int) -> list[str]:
    """Return a line for each of the first groups or leaves, with its fraction."""
    parts, norms = [*fields[field]], np.array([*fields[field].values()])
    rates, nonfinite = (
        [fields.get(each, {}).get(part, 0.0) for part in parts]
        for each in ("rate", "nonfinite")
    )
    fractions = fractions_of(norms).tolist()
    # NaN parameters make all leaves NaN, so the leaf that was first has most steps.
    is_finite = np.isfinite(norms)
    order = (
        -np.where(is_finite, norms, 0),
        np.where(is_finite, 0, np.negative(nonfinite)),
        is_finite,
    )
    lines = []
    for i in np.lexsort(order)[:most]:
        phrases = [f"clipped in {percent(rates[i])}"] if rates[i] else []
        phrases += [f"not finite in {nonfinite[i]:.0f}"] if nonfinite[i] else []
        end = f" ({', '.join(phrases)})" if phrases else ""
        row = f"  {percent(fractions[i]):>5}  {norms[i]:<8.4g}  {parts[i]}{end}"
        lines.append(row)
    left = len(parts) - len(lines)
    return lines + ([f"         and {left} more"] if left else [])


def _line_of_cotangents(name: str, fields: Fields) -> str:
    """Return the line of one backward pass."""
    norm, mean, clipped, fraction, nonfinite = (
        only(fields, field) for field in PROBE_FIELDS
    )
    phrases = [
        f"largest norm {norm:.4g}",
        f"mean coefficient {mean:.4g}",
        f"{clipped:.0f} clipped, {percent(fraction)}",
        *([f"{nonfinite:.0f} not finite"] if nonfinite else []),
    ]
    return f"{name}: {', '.join(phrases)}"
