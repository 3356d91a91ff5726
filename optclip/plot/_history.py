"""Find one clip, or its groups or leaves, in a recorded run; write the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from optclip._arrays import _validate
from optclip.monitor._interface import chosen, parts_in, read
from optclip.typing import History


class Clip(NamedTuple):
    """What one clip did, or did to one group or leaf.

    `title` is empty for the only clip of a run. A record of several norms has
    `fraction`, the fraction of them that was clipped, and no `after`: the largest norm
    and the smallest coefficient may be of two of them, so that their product is not a
    norm.
    """

    title: str
    steps: np.ndarray
    norm: np.ndarray
    threshold: np.ndarray
    after: np.ndarray | None
    clipped: np.ndarray
    fraction: np.ndarray | None


def save(history: History, path: str | os.PathLike[str]) -> None:
    """Write a history as JSON, one object a line, for `plot` and any other tool.

    Written is what `metrics` gave, and `step` if there is one. JSON has no numbers that
    are not finite: these are written as "inf" and "nan".

    Args:
      history: what `optclip.metrics` returned in a run: a list of dicts, one a step, a
        dict of arrays, or the path of a file that this wrote.
      path: of the file, which is replaced.

    Raises:
      TypeError: `history` is not of a form above, or `path` not a path.
      ValueError: it has no step, or steps of several kinds.

    Example:
      >>> import optclip, pathlib, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> optclip.plot.save({"clip/norm": [1.0, 2.5]}, file)
      >>> print(file.read_text().splitlines()[1])
      {"clip/norm": 2.5}
    """
    wanted = "a str or a pathlib.Path"
    _validate.kind("path", path, (str, os.PathLike), wanted)
    columns = read(history)
    steps = zip(*(map(_as_json, x.tolist()) for x in columns.values()), strict=True)
    lines = [json.dumps(dict(zip(columns, step, strict=True))) for step in steps]
    Path(path).write_text("\n".join(lines) + "\n")


def _as_json(x: float) -> float | str:
    return x if np.isfinite(x) else str(x)


def clip_in(history: History, clip: str | None, part: str | None) -> Clip:
    """One clip of a history, or one group or leaf of it.

    Raises:
      ValueError: there is no such clip or part, or several and none was named.
    """
    columns = read(history)
    by_name = parts_in(columns)
    name = chosen("clip", clip, list(by_name))
    parts = [label for label in by_name[name] if label]
    steps = steps_in(columns, len(next(iter(columns.values()))))
    end = f"/{chosen('part', part, parts)}" if parts or part is not None else ""

    def of(field: str) -> np.ndarray | None:
        return columns.get(f"{name}/{field}{end}")

    fields = ("norm", "threshold", "coefficient")
    norm, threshold, coefficient = (of(field) for field in fields)
    if norm is None or threshold is None or coefficient is None:
        present = " and ".join(field for field in fields if of(field) is not None)
        raise ValueError(
            f"`history` must have the norm, threshold and coefficient of '{name}{end}',"
            f" got its {present} alone. Give all that optclip.metrics returned."
        )
    # The largest float stands for inf where a norm was not finite.
    threshold = np.where(threshold >= np.finfo(np.float32).max, np.inf, threshold)
    fraction = of("fraction")
    if fraction is not None and end and _is_of_one_norm(fraction, norm, threshold):
        fraction = None
    with np.errstate(invalid="ignore"):
        after = norm * coefficient if fraction is None else None
    # As `metrics` counts its rate: not zeros, nor what `nonfinite=` zeroed or made NaN.
    clipped = (coefficient != 1) & (norm > 0) & np.isfinite(norm + coefficient)
    title = f"{name}{end}" if end or len(by_name) > 1 else ""
    return Clip(title, steps, norm, threshold, after, clipped, fraction)


def _is_of_one_norm(
    fraction: np.ndarray, norm: np.ndarray, threshold: np.ndarray
) -> bool:
    """Whether the record of a leaf reads as the record of one norm.

    A leaf has one norm, or one per unit or slice, of which the record does not tell.
    """
    is_above = (norm > threshold) & np.isfinite(norm)
    is_contradictory = np.any(is_above & (fraction == 0))
    return bool(
        np.all((fraction == 0) | (fraction == 1)) and not is_contradictory.any()
    )


def steps_in(columns: dict[str, np.ndarray], count: int) -> np.ndarray:
    """What was logged as `step`, or else 0, 1, ... up to that many."""
    return columns.get("step", np.arange(count, dtype=float))


def parts_of(
    history: History, clip: str | None
) -> tuple[str, np.ndarray, dict[str, np.ndarray]]:
    """The name of a clip by group or leaf, the steps, and the norms of its parts.

    Raises:
      ValueError: it has one norm only.
    """
    columns = read(history)
    by_name = parts_in(columns)
    parts_by_name = {name: _parts(columns, name) for name in by_name}
    parted = [name for name, parts in parts_by_name.items() if parts]
    name = chosen("clip", clip, parted if clip is None and parted else list(by_name))
    parts = parts_by_name[name]
    if not parts:
        raise ValueError(
            f"The clip '{name}' must have a norm for each group or leaf, got one norm a"
            " step. Clip by group, or give the clip record='leaves'."
        )
    return name, steps_in(columns, len(next(iter(parts.values())))), parts


def _parts(columns: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The norms of the groups or leaves of a clip, by their names."""
    parts: dict[str, np.ndarray] = {}
    for start in (f"{name}/norm/", f"{name}/leaf_norm/"):
        parts |= {
            k.removeprefix(start): x for k, x in columns.items() if k.startswith(start)
        }
    return parts
