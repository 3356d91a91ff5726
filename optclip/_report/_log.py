"""Find the metrics of optclip in a log, or the norm of another library."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

import numpy as np

from .._monitor import (
    PROBE_FIELDS,
    Fields,
    clips_in,
    fields_by_name,
    loss_key,
    only,
)
from ._entries import Entries, LogError
from ._formats import number_of

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
    """

    columns: dict[str, np.ndarray]
    norm: str | None
    is_numbered: bool
    read: int
    entries: int
    unit: str


def log_of(log: Entries, norm: str | None) -> Log:
    """Return the run in a log; `norm` is the key of its norm, None to look for it.

    Raises:
      LogError: It has no norms, or steps with different keys.
    """
    metrics = {} if norm else _metrics_in(log.keys)
    kinds = {
        key: _KINDS.get(field, "number")
        for fields in metrics.values()
        for field, parts in fields.items()
        for key in parts.values()
    } or {_norm_in(log, norm): "norm"}
    index = [i for i, row in enumerate(log.rows) if not row.keys().isdisjoint(kinds)]
    there = dict.fromkeys(key for i in index for key in log.rows[i])
    lower = {key.lower(): key for key in there}
    steps = [lower[name] for name in _STEPS if name in lower][:1]
    key = None if metrics else next(iter(kinds))
    kinds |= dict.fromkeys(steps, "count")
    columns = {key: log.column(key, index, kind) for key, kind in kinds.items()}
    if key is not None:
        # A slash would divide the name into a name and a field.
        name = re.sub(r"/(norm|total)\b", r".\1", key).split("/")[-1]
        columns[f"{name}/norm"] = columns[key] if key in steps else columns.pop(key)
    if steps:
        columns["step"] = columns.pop(steps[0])
    elif not metrics and "epoch" in lower:
        columns["step"] = _numbered(_optional(log, index, lower["epoch"]))
    # If only `skip` has a loss, its keys are metrics.
    of_skip = [only(fields, "loss") for fields in metrics.values()]
    if loss := loss_key(there) or next(filter(None, of_skip), None):
        columns["loss"] = _optional(log, index, loss)
        if np.isnan(columns["loss"]).all():
            del columns["loss"]
    is_numbered = not steps and not metrics
    return Log(columns, key, is_numbered, len(index), len(log.rows), log.unit)


def _optional(log: Entries, index: list[int], key: str) -> np.ndarray:
    """Return the numbers of a key in entries, NaN where there is none."""
    numbers = [number_of(log.rows[i].get(key)) for i in index]
    return np.array([np.nan if x is None else x for x in numbers])


def _numbered(epochs: np.ndarray) -> np.ndarray:
    """Number the rows of each run; another one begins where the epoch goes back."""
    rows = np.arange(len(epochs), dtype=float)
    is_first = np.diff(epochs, prepend=-np.inf) < 0
    return rows - np.maximum.accumulate(rows * is_first)


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


def _norm_in(log: Entries, norm: str | None) -> str:
    """Return the key of the norm."""
    if norm in log.keys:
        return str(norm)
    if norm is not None:
        raise LogError(f"{log.path} has no '{norm}'; it has {_numbers_in(log)}.")
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
