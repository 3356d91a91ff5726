"""Find a transformation, its groups or leaves in a recorded run; save a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._arrays import _validate
from .._monitor import (
    at,
    choice,
    chosen,
    clips_in,
    fields_by_name,
    has_run,
    only,
    others_in,
    outer_skip,
    read,
)
from .._typing import History


class Steps(NamedTuple):
    """Hold the position of each record on the x axis.

    Attributes:
      at: The step of each record, or the number of the record.
      label: Label of the axis, `"step"` or `"record"`.
    """

    at: np.ndarray
    label: str

    @property
    def unit(self) -> str:
        """The name of what a number of records counts."""
        is_each = self.label == "step" and np.all(np.diff(self.at) == 1)
        return "steps" if is_each else "records"


class ClipHistory(NamedTuple):
    """Hold the record of one transformation, or of one of its groups or leaves.

    `title` is empty for the only transformation of a run. A record of several norms has
    `fraction`, the fraction of them that was clipped. Its norm, threshold and
    coefficient are then of the norm with the largest ratio to its threshold.
    """

    title: str
    steps: Steps
    norm: np.ndarray
    threshold: np.ndarray
    after: np.ndarray
    clipped: np.ndarray
    fraction: np.ndarray | None


def save(history: History, path: str | os.PathLike[str]) -> None:
    """Save a history as JSON lines, one object per step, for `plot` and other tools.

    Writes the keys of `metrics`, and each other number, such as a step or a loss. JSON
    has no NaN or infinity, so they are written as the strings "nan" and "inf".

    Example:
      >>> import optclip, pathlib, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> optclip.plot.save({"clip/norm": [1.0, 2.5]}, file)
      >>> print(file.read_text().splitlines()[1])
      {"clip/norm": 2.5}

    Args:
      history: Output of `optclip.metrics` per step, in a form that `optclip.plot`
        describes.
      path: Path of the file; an existing file is replaced.

    Raises:
      ValueError: `history` is empty, or its steps have different keys.
    """
    _validate.kind("path", path, (str, os.PathLike), "a str or a pathlib.Path")
    # The other numbers hold the loss, with its key and without steps that lack it.
    columns = {key: x for key, x in read(history).items() if key != "loss"}
    steps = zip(*(x.tolist() for x in columns.values()), strict=True)
    metrics = [dict(zip(columns, step, strict=True)) for step in steps]
    rows = zip(metrics, others_in(history), strict=True)
    lines = [
        json.dumps({k: x if np.isfinite(x) else str(x) for k, x in (a | b).items()})
        for a, b in rows
    ]
    Path(path).write_text("\n".join(lines) + "\n")


def clip_in(history: History, clip: str | None, part: str | None) -> ClipHistory:
    """Return one transformation of a history, or one group or leaf of it.

    Raises:
      ValueError: The name does not exist, or there are several and none was passed.
    """
    columns = read(history)
    names = fields_by_name(columns)
    clips = clips_in(names)
    name, key = choice(names, clip, part)
    is_run = has_run(names, name)
    fields = at(names[name], is_run)
    steps = steps_in({column: x[is_run] for column, x in columns.items()})
    end = f"/{key}" if key else ""

    def of(field: str) -> np.ndarray | None:
        return fields.get(field, {}).get(key)

    needed = ("norm", "threshold", "coefficient")
    norm, threshold, coefficient = (of(field) for field in needed)
    if norm is None or threshold is None or coefficient is None:
        present = " and ".join(field for field in needed if of(field) is not None)
        raise ValueError(
            f"`history` must have the norm, threshold and coefficient of '{name}{end}',"
            f" got only its {present}. Pass all keys that optclip.metrics returned."
        )
    # Some pass the largest float as the threshold that clips nothing.
    threshold = np.where(threshold >= np.finfo(np.float32).max, np.inf, threshold)
    fraction = of("fraction")
    if fraction is not None and end and _is_of_one_norm(fraction, norm, threshold):
        fraction = None
    consecutive = only(fields, "consecutive")
    if consecutive is not None:
        # A step may be skipped because of its loss.
        coefficient = np.where(consecutive > 0, 0, coefficient)
    with np.errstate(invalid="ignore"):
        after = norm * coefficient
    # As in the rate of `metrics`, neither zeros nor norms that `nonfinite=` zeroed or
    # made NaN count.
    clipped = (coefficient != 1) & (norm > 0) & np.isfinite(norm + coefficient)
    if consecutive is not None:
        clipped = consecutive > 0
    elif fraction is not None:
        # Some responses change norms below their threshold too.
        clipped = fraction > 0
    title = f"{name}{end}" if end or len(clips) > 1 else ""
    return ClipHistory(title, steps, norm, threshold, after, clipped, fraction)


def _is_of_one_norm(
    fraction: np.ndarray, norm: np.ndarray, threshold: np.ndarray
) -> bool:
    """Return whether the record of a leaf is consistent with a single norm.

    A leaf has one norm, or one per unit or slice; the record does not specify which.
    """
    is_above = (norm > threshold) & np.isfinite(norm)
    return bool(np.all((fraction == 1) | ((fraction == 0) & ~is_above)))


def steps_in(columns: dict[str, np.ndarray]) -> Steps:
    """Return the logged `step`, or the number of updates before each, from 0.

    Records are numbered if they have no count of updates, or one that does not grow.
    """
    if "step" in columns:
        return Steps(columns["step"], "step")
    numbers = np.arange(len(next(iter(columns.values()))), dtype=float)
    names = fields_by_name(columns)
    counts = [
        names[name]["steps"][""] for name in clips_in(names) if "steps" in names[name]
    ]
    if not counts:
        return Steps(numbers, "step")
    # Transformations inside `skip` do not count the steps that it skipped.
    steps = np.max(counts, axis=0) - 1
    if np.all(np.diff(steps) > 0):
        return Steps(steps, "step")
    # The loop drops the new state, returned to an earlier one, or calls
    # `optax.MultiSteps`, which counts several microbatches as one step.
    return Steps(numbers, "record")


def parts_of(
    history: History, clip: str | None
) -> tuple[str, Steps, dict[str, np.ndarray]]:
    """Return the name of a transformation, the steps, and the norms of its parts.

    Raises:
      ValueError: The transformation has one norm only.
    """
    columns = read(history)
    names = fields_by_name(columns)
    parts_by_name = {
        name: {
            part: x
            for field in ("norm", "leaf_norm")
            for part, x in names[name].get(field, {}).items()
            if part
        }
        for name in clips_in(names)
    }
    parted = [name for name, parts in parts_by_name.items() if parts]
    # A transformation inside `skip` does not run in the steps that are looked for.
    clip = clip or outer_skip(names, parted)
    name = chosen("clip", clip, parted if clip is None and parted else [*parts_by_name])
    parts = parts_by_name[name]
    if not parts:
        raise ValueError(
            f"'{name}' has one norm per step, but a heatmap needs one per group or"
            " leaf. Use clip_by_group_norm, or build the transformation with"
            " record='leaves'."
        )
    return name, steps_in(columns), parts
