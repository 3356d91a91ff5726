"""Find the metrics of optclip, or the norms of another library, in a log."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._monitor import (
    PROBE_FIELDS,
    Fields,
    clips_in,
    fields_by_name,
    numbers_in,
    only,
)
from ._log_file import BARE, Entries, LogError, is_number

# Names of the norm in other libraries, before clipping first: some log both.
_NAMES = (
    ("grad_norm_before_clip", "grad_norm_pre_clip", "raw_grad_norm"),
    (
        "grad_norm", "gradient_norm", "global_grad_norm", "grad_global_norm",
        "total_grad_norm", "global_norm", "grad_l2_norm", "gnorm",
    ),
)  # fmt: skip
_STEPS = ("step", "global_step", "_step", "train/global_step")


class Log(NamedTuple):
    """Hold a logged run.

    Attributes:
      columns: One array over the steps per key of `metrics`, and `step` if logged. A
        norm of another library is a transformation that has a norm only.
      norm: The key of such a norm; None for the metrics of optclip, and for numbers
        without keys.
      is_bare: Whether the columns are of such a norm.
      read: Number of entries that were read.
      entries: Number of all entries.
      unit: What they are, `"line"` or `"entry"`.
    """

    columns: dict[str, np.ndarray]
    norm: str | None
    is_bare: bool
    read: int
    entries: int
    unit: str


def log_of(log: Entries, norm: str | None) -> Log:
    """Return the run in a log; `norm` is the key of its norm, None to look for it.

    Raises:
      LogError: It has no norms, or steps with different keys.
    """
    metrics = {} if norm or log.is_bare else _metrics_in(log.keys)
    keys = numbers_in(metrics) or [_norm_in(log, norm)]
    index = [i for i, row in enumerate(log.rows) if not row.keys().isdisjoint(keys)]
    there = set().union(*(log.rows[i] for i in index))
    step = next((key for key in _STEPS if key in there), None)
    _check_same(log, {*keys} | ({step} - {None}), index)
    columns = {key: log.column(key, index) for key in keys}
    clips = [fields for fields in metrics.values() if "norm" in fields]
    norms = [key for fields in clips for key in fields["norm"].values()]
    for key in norms or keys:
        _check(log, key, index, columns[key] < 0, "is negative")
    counts = [only(fields, "steps") for fields in metrics.values() if "steps" in fields]
    if step is not None:
        columns["step"] = log.column(step, index)
        _check(log, step, index, ~np.isfinite(columns["step"]), "is not finite")
    for key in counts:
        _check(log, key, index, ~np.isfinite(columns[key]), "is not finite")
    key = None
    if not metrics:
        # A slash would divide the name into a name and a field.
        (key,) = keys
        columns[f"{key.split('/')[-1]}/norm"] = columns.pop(key)
    shown = None if log.is_bare else key
    return Log(columns, shown, not metrics, len(index), len(log.rows), log.unit)


def _metrics_in(keys: list[str]) -> dict[str, Fields]:
    """Return the keys that `metrics` wrote, of probes and transformations with norms.

    Trainers log keys of the same form, such as ``eval/steps``.
    """
    names = fields_by_name({key: key for key in keys if key == key.strip("/")})
    clips = clips_in(names)
    probes = [n for n, fields in names.items() if fields.keys() >= {*PROBE_FIELDS}]
    for name in clips:
        if name not in probes:
            names[name].pop(PROBE_FIELDS[0], None)
    return {name: names[name] for name in (*clips, *probes)} if clips else {}


def _norm_in(log: Entries, norm: str | None) -> str:
    """Return the key of the norm."""
    if log.is_bare and norm is None:
        return BARE
    if norm in log.keys and not log.is_bare:
        return str(norm)
    numbers = [
        key for key in log.keys if all(is_number(row.get(key, 0)) for row in log.rows)
    ]
    listed = f"{', '.join(map(repr, numbers[:20]))}{', ...' if numbers[20:] else ''}"
    if norm is not None:
        present = "numbers without keys" if log.is_bare else f"the numbers {listed}"
        raise LogError(f"{log.path} has no {norm!r}, but {present}.")
    for names in _NAMES:
        matches = [key for key in log.keys if key.split("/")[-1].lower() in names]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LogError(
                f"{log.path} has several norms: {', '.join(map(repr, matches))}. Pass"
                f" one of them, such as --norm {matches[0]}."
            )
    raise LogError(
        f"{log.path} has no metrics of optclip and no 'grad_norm'; its numbers are"
        f" {listed or 'none'}. Pass the key of the norm with --norm KEY."
    )


def _check_same(log: Entries, keys: set[str], index: list[int]) -> None:
    """Raise an error unless these entries have the same of these keys."""
    first = keys & log.rows[index[0]].keys()
    for i in index:
        if odd := sorted(first ^ (keys & log.rows[i].keys())):
            places = log.places[index[0]], log.places[i]
            has, lacks = places if odd[0] in first else places[::-1]
            raise LogError(
                f"{log.at(places[1])} differs in its keys: {log.unit} {has} has"
                f" {odd[0]!r}, {log.unit} {lacks} does not. Log the same keys in each"
                " step."
            )


def _check(
    log: Entries, key: str, index: list[int], is_bad: np.ndarray, problem: str
) -> None:
    if is_bad.any():
        place = log.places[index[int(np.argmax(is_bad))]]
        raise LogError(f"{log.at(place)}: {key!r} {problem}, which no run logs.")
