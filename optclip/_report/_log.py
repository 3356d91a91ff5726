"""Find the metrics of optclip, or the norms of another library, in a log."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._monitor import PROBE_FIELDS, keys_of_metrics, parts_in, transform_of
from ._errors import LogError
from ._table import BARE, Table

# Names of the norm in other libraries, before clipping first: some log both.
_BEFORE = ("grad_norm_before_clip", "grad_norm_pre_clip", "raw_grad_norm")
_NAMES = (
    "grad_norm",
    "gradient_norm",
    "global_grad_norm",
    "grad_global_norm",
    "total_grad_norm",
    "global_norm",
    "grad_l2_norm",
    "gnorm",
)
_PROBE = f"/{PROBE_FIELDS[0]}"
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


def log_of(table: Table, norm: str | None) -> Log:
    """Return the run in a log; `norm` is the key of its norm, None to look for it.

    Raises:
      LogError: It has no norms, or steps with different keys.
    """
    metrics = (
        [] if norm or table.is_bare else _metrics_in(_without_foreign_forms(table.keys))
    )
    if metrics:
        entries = table.entries_with(set(metrics))
        columns = _columns(table, metrics, _norms_in(metrics), entries)
        return _log(table, columns, None, entries)
    key = _norm_in(table, norm)
    entries = table.entries_with({key})
    columns = _columns(table, [key], [key], entries)
    # A slash would divide the name into a name and a field.
    name = key.split("/")[-1] or BARE
    columns[f"{name}/norm"] = columns.pop(key)
    return _log(table, columns, key, entries)


def _log(
    table: Table,
    columns: dict[str, np.ndarray],
    key: str | None,
    entries: np.ndarray,
) -> Log:
    norm = None if table.is_bare else key
    count = len(table.places)
    return Log(columns, norm, key is not None, len(entries), count, table.unit)


def _metrics_in(keys: list[str]) -> list[str]:
    """Return the keys that `metrics` wrote, of transformations with a norm.

    Trainers log keys of the same form, such as ``eval/steps``.
    """
    norms = parts_in(keys)
    if not norms:
        return []
    present = set(keys)
    probes = {
        name
        for name in parts_in(keys, PROBE_FIELDS[0])
        if {f"{name}/{field}" for field in PROBE_FIELDS} <= present
    }
    names, ours = probes.union(norms), keys_of_metrics(keys)
    return [
        key
        for key in keys
        if key in ours
        and (transform_of(key) in names or key.removesuffix("/loss") in names)
        and (key.removesuffix(_PROBE) in probes or not key.endswith(_PROBE))
    ]


def _without_foreign_forms(keys: list[str]) -> list[str]:
    """Return the keys without those that have no name, and counts of a part."""
    return [k for k in keys if k == k.strip("/") and "/consecutive/" not in k]


def _norm_in(table: Table, norm: str | None) -> str:
    """Return the key of the norm."""
    if table.is_bare and norm is None:
        return BARE
    keys = table.numeric_keys
    if norm is not None and not table.is_bare and norm in table.keys:
        return norm
    listed = f"{', '.join(map(repr, keys[:20]))}{', ...' if keys[20:] else ''}"
    if norm is not None:
        present = "numbers without keys" if table.is_bare else f"the numbers {listed}"
        raise LogError(f"{table.path} has no {norm!r}, but {present}.")
    for names in (_BEFORE, _NAMES):
        matches = [key for key in table.keys if key.split("/")[-1].lower() in names]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LogError(
                f"{table.path} has several norms: {', '.join(map(repr, matches))}. Pass"
                f" one of them, such as --norm {matches[0]}."
            )
    raise LogError(
        f"{table.path} has no metrics of optclip and no 'grad_norm'; its numbers are"
        f" {listed or 'none'}. Pass the key of the norm with --norm KEY."
    )


def _columns(
    table: Table, keys: list[str], norms: list[str], entries: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the numbers of these keys, and the steps if they were logged."""
    step = next((key for key in _STEPS if _has(table, key, entries)), None)
    table.check_same({*keys, *filter(None, [step])}, entries)
    columns = {key: table.column(key, entries) for key in keys}
    for key in norms:
        _check(table, key, columns[key] < 0, "is negative", entries)
    counts = [key for key in keys if key == f"{transform_of(key)}/steps"]
    for key in (*counts, *filter(None, [step])):
        is_bad = ~np.isfinite(table.column(key, entries))
        _check(table, key, is_bad, "is not finite", entries)
    if step is not None:
        columns["step"] = table.column(step, entries)
    return columns


def _has(table: Table, key: str, entries: np.ndarray) -> bool:
    return key in table.keys and bool(np.isin(table.entries_with({key}), entries).any())


def _norms_in(keys: list[str]) -> list[str]:
    parted = parts_in(keys).items()
    pairs = [(name, part) for name, parts in parted for part in parts]
    return ["/".join(filter(None, (name, "norm", part))) for name, part in pairs]


def _check(
    table: Table, key: str, is_bad: np.ndarray, problem: str, entries: np.ndarray
) -> None:
    if is_bad.any():
        place = table.places[int(entries[np.argmax(is_bad)])]
        raise LogError(f"{table.at(place)}: {key!r} {problem}, which no run logs.")
