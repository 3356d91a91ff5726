"""The history of a run: for each quantity of each clip an array over the steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optclip._arrays import _validate
from optclip.monitor._interface import is_metric, parts_in
from optclip.typing import History

# In the record of several norms: the largest norm and the smallest coefficient may
# be of two of them, so that their product is not a norm.
_OF_SEVERAL = "fraction"


class Clip(NamedTuple):
    """What one clip did, or did to one group or leaf; None for what is not recorded.

    `title` is empty for the only clip of a run.
    """

    title: str
    steps: np.ndarray
    norm: np.ndarray
    threshold: np.ndarray
    after: np.ndarray | None
    clipped: np.ndarray


def read(history: History) -> dict[str, np.ndarray]:
    """Any form of a history as arrays of float64, one number a step.

    Losses, times and texts that were logged beside the metrics are left out, but for
    `step`.

    Raises:
      TypeError: it is not of a form that is accepted.
      ValueError: it has no step, steps with other keys than the first, or more steps
        of one quantity than of another.
    """
    if isinstance(history, (str, os.PathLike)):
        history = _lines_of(Path(history))
    if isinstance(history, Mapping):
        columns = {key: x for key, x in history.items() if _is_read(key)}
    elif isinstance(history, Sequence) and all(isinstance(h, Mapping) for h in history):
        columns = _columns(history)
    else:
        wanted = (
            "a list of dicts as optclip.metrics returns them, one dict of arrays, or"
            " the path of a file of JSON lines"
        )
        raise TypeError(_validate.must_be("history", wanted, history))
    arrays = {key: _numbers(key, x) for key, x in columns.items()}
    lengths = {len(x) for x in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(
            "`history` must have the same number of steps of each quantity, got"
            f" {' and '.join(map(str, sorted(lengths)))}. Give what optclip.metrics"
            " returned in each step, all of it."
        )
    if lengths == {0} or not history:
        raise ValueError(
            "`history` must have a step, got none. Give what optclip.metrics returned."
        )
    return arrays


def _is_read(key: str) -> bool:
    return key == "step" or is_metric(key)


def _numbers(key: str, x: Any) -> np.ndarray:
    # JSON has no infinity, so `save` writes it as a string.
    numbers = [float(entry) for entry in x] if _has_text(x) else x
    try:
        array = np.atleast_1d(np.asarray(numbers, float))
    except (TypeError, ValueError) as error:
        raise TypeError(
            _validate.must_be(f"`history` at {key!r}", "numbers, one a step", x)
        ) from error
    if array.ndim > 1:
        raise ValueError(
            f"`history` at {key!r} must be one number a step, got an array of shape"
            f" {array.shape}. Give it as optclip.metrics returned it, or leave it out."
        )
    return array


def _lines_of(path: Path) -> list[Any]:
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entries += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Line {number} of {path} must be a JSON object, as optclip.plot.save"
                f" writes it, got {line!r:.80}."
            ) from error
    return entries


def _columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = [key for key in steps[0] if _is_read(key)] if steps else []
    for i, step in enumerate(steps):
        odd = sorted(set(keys) ^ {key for key in step if _is_read(key)})
        if odd:
            raise ValueError(
                f"`history` must have the same keys in each step, got {odd} in only one"
                f" of the steps 0 and {i}. Give the metrics of one optimizer."
            )
    return {key: [step[key] for step in steps] for key in keys}


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


def _has_text(x: Any) -> bool:
    return isinstance(x, list) and any(entry in ("inf", "-inf", "nan") for entry in x)


def clip_in(history: History, clip: str | None, part: str | None) -> Clip:
    """One clip of a history, or one group or leaf of it.

    Raises:
      ValueError: there is no such clip or part, or several and none was named.
    """
    columns = read(history)
    by_name = parts_in(columns)
    name = _chosen("clip", clip, list(by_name))
    parts = [label for label in by_name[name] if label]
    steps = steps_in(columns, len(next(iter(columns.values()))))
    end = f"/{_chosen('part', part, parts)}" if parts or part is not None else ""

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
    several = of(_OF_SEVERAL) is not None
    with np.errstate(invalid="ignore"):
        after = None if several else norm * coefficient
    # As `metrics` counts its rate: not zeros, nor what `nonfinite=` zeroed or made NaN.
    clipped = (coefficient != 1) & (norm > 0) & np.isfinite(norm + coefficient)
    title = f"{name}{end}" if end or len(by_name) > 1 else ""
    return Clip(title, steps, norm, threshold, after, clipped)


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
    name = _chosen("clip", clip, parted if clip is None and parted else list(by_name))
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


def _chosen(what: str, name: str | None, names: list[str]) -> str:
    """The name that was given, or the only one there is."""
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    if not names:
        which = "norms of a clip" if what == "clip" else "groups or leaves"
        raise ValueError(
            f"`history` must have {which}, got none. Give what optclip.metrics"
            " returned."
        )
    advice = f"Give {what}={names[0]!r}, say."
    raise ValueError(_validate.must_be(what, f"one of {names}", name, advice))
