"""Find the metrics of optclip in a log, or the norm of another library."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._monitor import (
    PROBE_FIELDS,
    Fields,
    clips_in,
    fields_by_name,
    likely_losses,
    loss_key,
    losses_of,
    number_of,
    only,
)
from ._entries import Entries, LogError

# Fields of which a transformation has at least one, besides its norm.
_BESIDE = "threshold", "coefficient", "steps"
# What the numbers of some fields are; others are only numbers.
_KINDS = {"norm": "norm", "steps": "count"}
# Names of the norm in other libraries, before clipping first: some log both. The last
# are those of optclip without other metrics, and of TensorBoard's downloads.
_NORMS = (
    "(.*/)?(grad_norm_(before|pre)_clip|raw_grad_norm)",
    "(.*/)?((global_|total_)?grad(ient)?s?_norm|grad_global_norm|global_norm"
    "|grad_l2_norm|grad_2[.]0_norm_total|gnorm)",
    "(.*/)?grad(ient)?s?[/_](global_)?norm(/total)?",
    "norm|clip/norm|value",
)
_STEPS = (
    "step", "global_step", "_step", "train/global_step", "trainer/global_step",
    "train/step",
)  # fmt: skip


class Log(NamedTuple):
    """Hold a logged run.

    Attributes:
      columns: One array over the steps per key of `metrics`, and `step` and `loss` if
        logged. A norm of another library is a transformation that has a norm only.
      norm: The key of such a norm; None for the metrics of optclip.
      is_numbered: Whether the steps are the numbers of the entries that were read.
      read: Number of entries that were read.
      entries: Number of all entries.
      unit: What they are, `"line"` or `"entry"`.
      notes: What was not read.
    """

    columns: dict[str, np.ndarray]
    norm: str | None
    is_numbered: bool
    read: int
    entries: int
    unit: str
    notes: list[str]


def log_of(log: Entries, norm: str | None, loss: str | None = None) -> Log:
    """Return the run in a log; `norm` and `loss` are keys, None to look for them.

    Raises:
      LogError: It has no such key, no norms, or steps with different keys.
    """
    for key in (norm, loss):
        if key not in (None, *log.keys):
            raise LogError(f"{log.path} has no '{key}'; it has {_numbers_in(log)}.")
    metrics = {} if norm else _metrics_in(log.keys)
    kinds = {
        key: _KINDS.get(field, "number")
        for fields in metrics.values()
        for field, parts in fields.items()
        for key in parts.values()
    } or {norm or _norm_in(log): "norm"}
    # If only `skip` has a loss, its keys are metrics.
    of_skip = [only(fields, "loss") for fields in metrics.values()]
    loss = loss or loss_key(log.keys) or next(filter(None, of_skip), None)
    lower = {key.lower(): key for key in log.having(kinds).keys}
    step = next((lower[name] for name in _STEPS if name in lower), None)
    merged = log if step is None else log.merged(step, {*kinds, loss})
    rows = merged.having(kinds)
    columns = {key: rows.column(key, kind) for key, kind in kinds.items()}
    key = None if metrics else next(iter(kinds))
    if key is not None:
        # A slash would divide the name into a name and a field.
        name = re.sub(r"/(norm|total)\b", r".\1", key).split("/")[-1]
        columns = {f"{name}/norm": columns[key]}
    if step is not None:
        columns["step"] = rows.column(step, "count")
    elif not metrics and "epoch" in lower:
        # Rows are numbered in each run; another one begins where the epoch goes back.
        is_first = np.diff(rows.numbers(lower["epoch"]), prepend=-np.inf) < 0
        numbers = np.arange(len(is_first), dtype=float)
        columns["step"] = numbers - np.maximum.accumulate(numbers * is_first)
    losses = losses_of(row.get(loss or "") for row in rows.rows)
    if not np.isnan(losses).all():
        columns["loss"] = losses
    notes = log.notes + _lost(merged.having({*kinds, loss}), kinds, step)
    likely = likely_losses(log.keys)
    if loss is not None and "loss" not in columns:
        notes += [f"no loss was read; no '{loss}' beside a norm is a number"]
    elif loss is None and likely:
        notes += [f"no loss was read; perhaps {_listed(likely)}: pass --loss KEY"]
    if 2 * np.sum(np.diff(columns.get("step", [])) == 0) >= len(rows.rows):
        notes += ["steps have several rows each, as of several processes; all are read"]
    if step is not None and _is_shuffled(columns["step"]):
        order = np.argsort(columns["step"])
        columns = {key: x[order] for key, x in columns.items()}
    return Log(
        columns=columns,
        norm=key,
        is_numbered=step is None and not metrics,
        read=len(rows.entries),
        entries=len(log.entries),
        unit=log.unit,
        notes=notes,
    )


def _lost(log: Entries, kinds: Mapping[str, str], step: str | None) -> list[str]:
    """Say since when entries have a loss only, of which others also have a norm."""
    has_norm = [not row.keys().isdisjoint(kinds) for row in log.rows]
    ends = np.flatnonzero([True, *has_norm, True])
    gaps = np.diff(ends) - 1
    # A trainer may log the norm less often.
    is_lost = gaps > 2 * np.median(gaps)
    if not is_lost.any():
        return []
    place, row = log.entries[ends[np.argmax(is_lost)]]
    at = number_of(row.get(step))
    since = f"{log.unit} {place}" if at is None else f"step {at:.15g}"
    count = gaps[is_lost].sum()
    losses = "1 loss has" if count == 1 else f"{count} losses have"
    return [f"{losses} no norm, since {since}; the norm may be NaN there"]


def _is_shuffled(steps: np.ndarray) -> bool:
    """Return whether sorted steps are those of one run, without a restart.

    After a restart steps repeat, or fall between those that were logged before.
    """
    gaps = np.diff(np.sort(steps))
    is_reversed = np.all(np.diff(steps) < 0)
    return len(gaps) > 1 and bool(is_reversed or 0 < np.median(gaps) <= gaps.min())


def _metrics_in(keys: list[str]) -> dict[str, Fields]:
    """Return the keys that `metrics` wrote, of probes and transformations with norms.

    Trainers log keys of the same form, such as ``eval/steps``, and Levanter
    ``params/norm/total``, without a threshold, coefficient or count of steps.
    """
    names = fields_by_name({key: key for key in keys if key == key.strip("/")})
    clips = [name for name in clips_in(names) if {*_BESIDE} & {*names[name]}]
    probes = [n for n, fields in names.items() if fields.keys() >= {*PROBE_FIELDS}]
    for name in {*clips} - {*probes}:
        names[name].pop(PROBE_FIELDS[0], None)
    return {name: names[name] for name in (*clips, *probes)} if clips else {}


def _norm_in(log: Entries) -> str:
    """Return the key of the norm."""
    names = {
        key: re.sub("[- ]", "_", key.lower().replace(" - ", "/")) for key in log.keys
    }
    for pattern in _NORMS:
        matches = [key for key, name in names.items() if re.fullmatch(pattern, name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LogError(
                f"{log.path} has several norms: {_listed(matches)}. Pass one of them,"
                f" such as --norm {shlex.quote(matches[0])}."
            )
    raise LogError(
        f"{log.path} has no metrics of optclip and no 'grad_norm'; it has"
        f" {_numbers_in(log)}. Pass the key of the norm with --norm KEY."
    )


def _numbers_in(log: Entries) -> str:
    """Return the keys of numbers as text."""
    keys = [
        key
        for key in log.keys
        if all(number_of(row.get(key, 0)) is not None for row in log.rows)
    ]
    return f"the numbers {_listed(keys)}" if keys else "no numbers"


def _listed(keys: list[str]) -> str:
    # `--norm` takes them as they are, which `repr` would escape.
    first = ", ".join(f"'{key}'" for key in keys[:20])
    return f"{first}, ..." if keys[20:] else first
