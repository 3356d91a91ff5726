"""Read the run that a step belongs to: its losses and norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._arrays import _validate
from .._monitor import (
    Fields,
    fields_by_name,
    has_run,
    is_rejected,
    only,
    read,
    states_in,
)
from .._monitor import history as history_of
from .._typing import History, PyTree

# The kind of a number, and the path of a leaf; "" for a number of the whole step.
Key = tuple[str, str]
LOSS, NORM, STEP, LEAF = ("loss", ""), ("norm", ""), ("step", ""), "leaf"
# What a run recorded: arrays over its rows, or the numbers of one row.
Numbers = dict[Key, Any]


def recorded_in(
    history: History | PyTree, names: list[str], step: int | None
) -> tuple[Numbers, Numbers]:
    """Return the losses and norms of the rows before a step, and those of its own row.

    The norm covers the recorded leaves, or else all. Numbers that a row lacks or only
    repeats are NaN in arrays, and missing in the row. With a step, the numbers of the
    rows that led to it are there, NaN where they were skipped.

    Args:
      history: A history, or the state of an optimizer that has one.
      names: Paths of the leaves.
      step: Number of the row of the step; None for all rows, and no row.

    Raises:
      ValueError: The history has neither a loss nor a norm, or not this step.
    """
    # A list of dicts may be long, and is a log.
    is_log = isinstance(history, list) or not states_in(history)
    columns = read(history if is_log else history_of(history))
    count = len(next(iter(columns.values()), ()))
    steps = columns.get("step", np.arange(count))
    at = None if step is None else _row_of(step, steps)
    both: tuple[Numbers, Numbers] = {}, {}
    for key, numbers, is_own in _series(columns, names, count):
        both[0].setdefault(key, np.where(is_own, numbers, np.nan)[:at])
        if at is not None and is_own[at]:
            both[1].setdefault(key, float(numbers[at]))
    if not both[0]:
        raise ValueError(
            "`history` has no L2 norms of the leaves of `params`, such as"
            f" {names[0]!r}, no L2 norm of all leaves, and no loss. Record them:"
            ' optclip.skip(tx, record="leaves"), or'
            ' clip_by_global_norm(..., record="leaves").'
        )
    for each in both:
        if leaves := [norm for key, norm in each.items() if key[0] == LEAF]:
            each[NORM] = np.hypot.reduce(leaves)
    if at is not None:
        both[0][STEP] = np.where(_is_applied(columns, steps, at), steps[:at], np.nan)
    return both


def _is_applied(
    columns: Mapping[str, np.ndarray], steps: np.ndarray, at: int
) -> np.ndarray:
    """Return the rows before one that were neither skipped nor lost by a restart."""
    skips = [
        only(fields, "consecutive", np.zeros(len(steps))) + is_rejected(fields)
        for fields in fields_by_name(columns).values()
    ]
    skipped = np.any([x[:at] > 0 for x in skips], axis=0)
    later = np.minimum.accumulate(steps[at::-1])[::-1]
    return (steps[:at] <= later[1:]) & ~skipped


def _row_of(step: Any, steps: np.ndarray) -> int:
    """Return the last row of a step; a run that was restarted may have several."""
    # The count of an optimizer is an array.
    step = step.item() if isinstance(step, jax.Array) and step.ndim == 0 else step
    rows = np.flatnonzero(steps == _validate.length("step", step, least=0))
    _validate.require(
        "step", step, len(rows) > 0,
        f"a recorded step, from {min(steps):.0f} to {max(steps):.0f}",
        "A state keeps the last rows; a log may have earlier ones.",
    )  # fmt: skip
    return int(rows[-1])


def _series(
    columns: Mapping[str, np.ndarray], names: list[str], count: int
) -> Iterator[tuple[Key, np.ndarray, np.ndarray]]:
    """Yield the losses and norms of all rows, with the rows that computed them.

    Norms of the whole gradient come first: others may be of updates, and those inside
    `skip` lack the skipped steps.
    """
    clips = fields_by_name(columns)
    order = sorted(clips, key=lambda name: "skipped" not in clips[name])
    losses = [columns.get("loss"), *(only(clips[name], "loss") for name in order)]
    yield from ((LOSS, x, ~np.isnan(x)) for x in losses if x is not None)
    for field in ("leaf_norm", "norm"):
        for name in filter(lambda name: _may_be_l2(clips[name]), order):
            # Within `optax.MultiSteps`, only the last of several rows has a new norm.
            steps = only(clips[name], "steps", np.arange(count))
            is_own = has_run(clips, name) & (np.diff(steps, prepend=-1) != 0)
            for part, norms in clips[name].get(field, {}).items():
                if part in names:
                    yield (LEAF, part), norms, is_own
                # With a fraction, it is the most clipped of several norms.
                if field == "norm" and not part and "fraction" not in clips[name]:
                    yield NORM, norms, is_own


def _may_be_l2(fields: Fields) -> bool:
    """Return whether the norm of all leaves is the L2 norm of their norms, if known."""
    leaves = [*fields.get("leaf_norm", {}).values()]
    whole = only(fields, "norm", np.nan)
    is_same = np.isclose(np.hypot.reduce(leaves), whole, rtol=1e-3)
    return not leaves or bool(np.all(is_same | ~np.isfinite(whole)))
