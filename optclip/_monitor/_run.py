"""Read a recorded run: the numbers of each transformation, by field and part."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._arrays import _validate
from .._typing import History
from ._metrics import FIELDS

# Keys of a training loss, the clearest first, and words in keys of other losses.
_LOSSES = (
    "loss", "train/loss", "train_loss", "training_loss", "total_loss",
    "lm loss", "global_avg_loss",  # Megatron, torchtitan
)  # fmt: skip
_OTHER_LOSSES = {
    "eval", "evaluation", "val", "valid", "validation", "test", "dev", "scale"
}  # fmt: skip
# JSON has no such numbers, so `save` writes them as strings.
_NOT_FINITE = "inf", "-inf", "nan"

# The numbers of one transformation by field, such as `"norm"`, and by part: the label
# of a group or the path of a leaf. The only norm of a transformation has the part "".
Fields = dict[str, dict[str, Any]]


def fields_by_name(metrics: Mapping[str, Any]) -> dict[str, Fields]:
    """Return the numbers in a dict of metrics by transformation, field and part.

    Other keys are skipped. ``skip/loss`` counts only with ``skip/loss_threshold``,
    since trainers log losses of the same form, such as ``eval/loss``, in some steps.
    """
    names: dict[str, Fields] = {}
    for key, numbers in metrics.items():
        words = str(key).split("/")
        # The first match is the field, since a leaf's path may contain such a word.
        at = next((i for i, word in enumerate(words) if i and word in FIELDS), None)
        if at is not None:
            name, part = "/".join(words[:at]), "/".join(words[at + 1 :])
            names.setdefault(name, {}).setdefault(words[at], {})[part] = numbers
    for name, fields in names.items():
        if "loss_threshold" in fields and (key := f"{name}/loss") in metrics:
            fields["loss"] = {"": metrics[key]}
    return names


def clips_in(names: Mapping[str, Fields]) -> list[str]:
    """Return the transformations that have norms; a probe has none."""
    return [name for name, fields in names.items() if "norm" in fields]


def keys_of_metrics(keys: Iterable[str]) -> list[str]:
    """Return the keys that `metrics` wrote, in their order."""
    keys = list(keys)
    names = fields_by_name({key: key for key in keys})
    fields = [parts for each in names.values() for parts in each.values()]
    chosen = {key for parts in fields for key in parts.values()}
    return [key for key in keys if key in chosen]


def read(history: History, argument: str = "history") -> dict[str, np.ndarray]:
    """Return a history in any form as arrays of float64, one number per step.

    Of the other quantities that were logged, `step` and the loss are read, the latter
    as `loss`, with NaN in steps without one. Errors name the argument that the user
    passed.

    Raises:
      TypeError: The form is not accepted.
      ValueError: There are no steps, steps with different keys, or quantities with
        different numbers of steps.
    """
    history = loaded(history)
    if isinstance(history, Mapping):
        columns = {key: history[key] for key in _keys_read(history)}
    elif isinstance(history, Sequence) and all(isinstance(h, Mapping) for h in history):
        columns = _columns(history, argument)
    else:
        wanted = (
            "a list of dicts from optclip.metrics, a dict of arrays, or the path of a"
            " file of JSON lines"
        )
        raise TypeError(_validate.must_be(argument, wanted, history))
    arrays = {
        key: _numbers(f"`{argument}` at {key!r}", x) for key, x in columns.items()
    }
    lengths = {len(x) for x in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"`{argument}` must have the same number of steps for each quantity, got"
            f" {' and '.join(map(str, sorted(lengths)))}. Pass all keys that"
            " optclip.metrics returned, for every step."
        )
    if lengths == {0} and isinstance(history, Mapping):
        raise ValueError(
            f"`{argument}` has recorded no step yet. Pass the state after an update:"
            " optclip.history(opt_state)."
        )
    if not history:
        raise ValueError(
            f"`{argument}` is empty. Pass the dicts that optclip.metrics returned, one"
            " per step."
        )
    return arrays | _losses_in(history, lengths)


def loss_key(keys: Iterable[str]) -> str | None:
    """Return the key of the training loss; None if there is none, or if unclear."""
    keys = {str(key): key for key in keys}
    if names := [name for name in _LOSSES if name in keys]:
        return keys[names[0]]
    names = [x for x in likely_losses(keys) if x.lower().split("/")[-1] in _LOSSES]
    return keys[names[0]] if len(names) == 1 else None


def likely_losses(keys: Iterable[str]) -> list[str]:
    """Return the keys that may be those of a training loss."""
    others = {*keys_of_metrics(keys)}
    return [
        key
        for key in keys
        if "loss" in key.lower()
        and key not in others
        and not _OTHER_LOSSES & {*re.split(r"[^a-z]+", key.lower())}
    ]


def _losses_in(history: Any, lengths: set[int]) -> dict[str, np.ndarray]:
    """Return the losses of a history under the key `loss`, if it has any."""
    is_dict = isinstance(history, Mapping)
    rows = [history] if is_dict else history
    key = loss_key(dict.fromkeys(key for row in rows for key in row))
    losses: Any = [x.get(key) for x in rows if key]
    losses = history[key] if is_dict and key else losses
    # Rows without metrics and steps have a number, too.
    count = max(lengths, default=np.size(losses) if is_dict else len(rows))
    if key is None or not _is_column(losses, count):
        return {}
    numbers = losses_of(losses)
    return {} if np.isnan(numbers).all() else {"loss": numbers}


def losses_of(values: Iterable[Any]) -> np.ndarray:
    """Return losses as numbers: NaN where there is none, inf where one is not finite.

    NaN in a third of the rows before the last finite loss are losses that were not
    logged.
    """
    read = [number_of(x) for x in values]
    losses = np.array(read, float)
    is_nan = np.isnan(losses) & [x is not None for x in read]
    count = 1 + max(np.flatnonzero(np.isfinite(losses)), default=-1)
    losses[is_nan & (3 * is_nan[:count].sum() < max(count, 1))] = np.inf
    return losses


def number_of(x: Any) -> float | None:
    """Return the number in an entry, also if it is written as text, as `save` does."""
    if isinstance(x, bool):
        return None
    try:
        number = float(x)
    except (TypeError, ValueError, OverflowError):
        return None
    # Sums of larger numbers are not finite, nor are quotients by smaller ones.
    if abs(number) > 1e300:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < 1e-300 else number


def others_in(history: History) -> list[dict[str, float]]:
    """Return the numbers of each step that `read` does not read, such as a loss."""
    history = loaded(history)
    if isinstance(history, Mapping):
        count = len(next(iter(read(history).values())))
        rest = {key: x for key, x in history.items() if _is_column(x, count)}
        history = [{key: x[i] for key, x in rest.items()} for i in range(count)]
    return [_others(step) for step in history]


def _others(step: Mapping[str, Any]) -> dict[str, float]:
    are_read, others = {*_keys_read(step)}, {}
    for key, x in step.items():
        # A log may also hold names, and arrays or lists such as a histogram.
        if key not in are_read and (not isinstance(x, str) or x in _NOT_FINITE):
            with contextlib.suppress(TypeError, ValueError):
                is_scalar = np.ndim(x) == 0  # Raises ValueError for a ragged list.
                others |= {key: float(x)} if is_scalar else {}
    return others


def _is_column(x: Any, count: int) -> bool:
    shape = getattr(x, "shape", (len(x),) if isinstance(x, (list, tuple)) else ())
    return shape[:1] == (count,)


def without_skipped(names: Mapping[str, Fields]) -> dict[str, Fields]:
    """Return each transformation without the steps in which it did not run.

    The arrays of transformations then differ in length.
    """
    rows = {name: has_run(names, name) for name in names}
    taken = {name: rows[name] & ~is_rejected(x) for name, x in names.items()}
    rows |= {name: x for name, x in taken.items() if x.any()}
    return {name: at(fields, rows[name]) for name, fields in names.items()}


def at(fields: Fields, index: Any) -> Fields:
    """Return the numbers of a transformation at one step or several."""
    return {
        field: {part: x[index] for part, x in parts.items()}
        for field, parts in fields.items()
    }


def has_run(
    names: Mapping[str, Fields], name: str, *, or_all: bool = True
) -> np.ndarray:
    """Return the steps in which no `skip` around a transformation skipped it.

    In the other steps its thresholds are NaN in the output of `history`, and its count
    of steps stays the same in the metrics of each step. If it ran in none, `or_all`
    returns all steps, so that there is something to read.
    """
    fields = names[name]
    parts = next(iter(fields.values()))
    every = np.ones(len(next(iter(parts.values()))), bool)
    thresholds = list(fields.get("threshold", {}).values())
    consecutive = [only(each, "consecutive", 0 * every) for each in names.values()]
    if not thresholds:
        return every
    is_nan = np.isnan(thresholds).all(axis=0)
    counts = only(fields, "steps", np.full(len(every), np.nan))
    is_repeated = np.diff(counts, prepend=0) == 0
    is_run = ~((is_nan | is_repeated) & np.any(np.array(consecutive) > 0, axis=0))
    return every if or_all and not is_run.any() else is_run


def is_rejected(fields: Fields) -> np.ndarray:
    """Return the steps whose thresholds are NaN because a transformation did not run.

    `optax.apply_if_finite` around it has no count, as `skip` has, of such steps in a
    row. In the first row, a NaN is the only sign.
    """
    rows = next(iter(next(iter(fields.values())).values()))
    thresholds = [*fields.get("threshold", {}).values()] or [np.zeros(len(rows))]
    steps = only(fields, "steps", np.arange(len(rows)))
    is_repeated = np.diff(steps, prepend=steps[:1]) == 0
    return np.isnan(thresholds).all(axis=0) & is_repeated


def only(fields: Fields, field: str, default: Any = None) -> Any:
    """Return the numbers of a field without parts, or the default if there are none."""
    return fields.get(field, {}).get("", default)


def _keys_read(keys: Mapping[str, Any]) -> list[str]:
    chosen = {*keys_of_metrics(keys), "step"}
    return [key for key in keys if key in chosen]


def _numbers(place: str, x: Any) -> np.ndarray:
    try:
        array = np.atleast_1d(np.asarray(x, float))
    except (TypeError, ValueError) as error:
        raise TypeError(_validate.must_be(place, "numbers, one per step", x)) from error
    if array.ndim > 1:
        raise ValueError(
            f"{place} must be one number per step, got an array of shape"
            f" {array.shape}. Pass the scalars that optclip.metrics returned, or remove"
            " the key."
        )
    return array


def loaded(history: Any) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """Return the steps in a file of JSON lines; other histories are unchanged.

    Raises:
      ValueError: A line is not JSON.
    """
    if not isinstance(history, (str, os.PathLike)):
        return history
    entries, path = [], Path(history)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entries += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Line {number} of {path} is not JSON: {line!r:.80}. Pass a file that"
                " optclip.plot.save wrote."
            ) from error
    return entries


def _columns(steps: Sequence[Mapping[str, Any]], argument: str) -> dict[str, list[Any]]:
    keys = _keys_read(steps[0]) if steps else []
    for i, step in enumerate(steps):
        if step.keys() == steps[0].keys():
            continue
        if odd := sorted(set(keys).symmetric_difference(_keys_read(step))):
            raise ValueError(
                f"`{argument}` must have the same keys in each step, but only one of"
                f" the steps 0 and {i} has {odd}. Pass the metrics of one optimizer."
            )
    return {key: [step[key] for step in steps] for key in keys}


def chosen(what: str, name: str | None, names: list[str], run: str = "history") -> str:
    """Return the name that was passed, or the only one there is.

    Raises:
      ValueError: The name does not exist, or there are several and none was passed.
    """
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    missing = "clipping norms" if what == "clip" else "groups or leaves"
    advice = f"Pass one of them, such as {what}={names[0]!r}." if names else ""
    raise ValueError(
        _validate.must_be(what, f"one of {names}", name, advice)
        if names
        else f"`{run}` has no {missing}. Pass the dicts that optclip.metrics returned."
    )


def outer_skip(names: Mapping[str, Fields], among: Iterable[str]) -> str | None:
    """Return the only `skip` among transformations, which records all steps."""
    skips = [name for name in among if "skipped" in names[name]]
    return skips[0] if len(skips) == 1 else None
