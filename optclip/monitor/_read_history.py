"""Read a recorded run: one array over the steps for each quantity of each clip."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optclip._arrays import _validate
from optclip.monitor._metrics import is_metric
from optclip.typing import History


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
        history = lines_of(history)
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


def lines_of(path: str | os.PathLike[str]) -> list[Any]:
    """Return the steps in a file of JSON lines.

    Raises:
      ValueError: a line is not JSON.
    """
    entries, path = [], Path(path)
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


def _has_text(x: Any) -> bool:
    return isinstance(x, list) and any(entry in ("inf", "-inf", "nan") for entry in x)


def chosen(what: str, name: str | None, names: list[str], run: str = "history") -> str:
    """Return the name that was passed, or the only one there is.

    Raises:
      ValueError: there is no such name, or several and none was passed.
    """
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    if not names:
        which = "norms of a clip" if what == "clip" else "groups or leaves"
        raise ValueError(
            f"`{run}` must have {which}, got none. Give what optclip.metrics returned."
        )
    advice = f"Pass one of them, such as {what}={names[0]!r}."
    raise ValueError(_validate.must_be(what, f"one of {names}", name, advice))
