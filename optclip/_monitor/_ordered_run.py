"""Put the rows of a run in order, and find what stands out in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ._outliers import Outliers, outliers, spans, start_of
from ._run import Fields, at, has_run, losses_of, only

# The number of runs of steps and of leaves that are named.
NAMED = 5
# More returns to an earlier step are not those of a run that was restarted.
_MOST_RESTARTS = 100
# Smaller norms, relative to the largest of the step, are rounding errors.
_NOISE = 1e-6


def ranges(flags: np.ndarray, numbers: np.ndarray) -> str:
    """Return the numbers of the rows with a flag as text."""
    ends = [(f"{numbers[i]:.15g}", f"{numbers[j - 1]:.15g}") for i, j in spans(flags)]
    words = [first if first == last else f"{first} to {last}" for first, last in ends]
    return ", ".join([*words[:NAMED], *["..."][: len(words) - NAMED]])


class Run(NamedTuple):
    """Hold the recorded steps.

    Attributes:
      names: The transformations, `skip` first, since it records all steps. Norms are 0
        in steps in which a transformation did not run.
      steps: Number of each row.
      is_state: Whether there is one row, of a state.
      loss: Loss of each row, NaN without one.
      has_start: Whether the first row is at the start of the run.
      outliers: For each transformation, what stands out in each of its norms.
      of_loss: What stands out in the loss.
      start: Whether each row is of the start of the run.
      skipped: Whether a `skip` skipped each row.
      explained: Whether a graver finding explains each row.
    """

    names: Mapping[str, Fields]
    steps: np.ndarray
    is_state: bool
    loss: np.ndarray
    has_start: bool
    outliers: Mapping[str, Mapping[str, Outliers]]
    of_loss: Outliers
    start: np.ndarray
    skipped: np.ndarray
    explained: np.ndarray

    def named(self, rows: np.ndarray) -> str:
        """Return the numbers of some rows as text."""
        return ranges(rows, self.steps)

    def step(self, row: int) -> str:
        """Return the number of a row as text."""
        return f"{self.steps[row]:.15g}"

    def cause(self, row: int) -> int:
        """Return the first of the applied rows that stand out just before a row."""
        found = [x.rows for parts in self.outliers.values() for x in parts.values()]
        stands_out = np.any([self.of_loss.rows, *found], axis=0) & ~self.skipped
        return row - int(np.argmin([*stands_out[:row][::-1], False]))

    def call(self, rows: np.ndarray, row: int) -> str:
        """Return the advice to explain the first step of the rows around one."""
        cause = self.cause(next(i for i, j in spans(rows) if i <= row < j))
        is_named = cause == row and rows.sum() == 1
        which = "that step" if is_named else f"step {self.step(cause)}"
        return f"Call optclip.explain with the batch of {which}."


def run_of(
    names: Mapping[str, Fields], steps: np.ndarray | None, loss: np.ndarray | None
) -> Run:
    """Return the rows of a run in order, without those that it repeats.

    Args:
      names: The transformations, with an array over the steps for each number.
      steps: The recorded steps of a history; None for the metrics of one step.
      loss: The loss of each step, NaN where it is not known; None without losses.
    """
    names = dict(sorted(names.items(), key=lambda item: "skipped" not in item[1]))
    of_skips = [losses_of(x["loss"][""]) for x in names.values() if "loss" in x]
    loss = next((x for x in (loss, *of_skips) if x is not None), None)
    is_state, steps = steps is None, np.zeros(1) if steps is None else steps
    loss = np.full(len(steps), np.nan) if loss is None else loss
    order = _in_order(steps)
    names = {name: at(fields, order) for name, fields in names.items()}
    is_run = {name: has_run(names, name, or_all=False) for name in names}
    # A wrapper such as optax.MultiSteps repeats the numbers of a skipped step.
    ran = np.any([*is_run.values()], axis=0)
    ran |= not ran.any()
    for name, fields in names.items():
        for parts in (fields.get(field, {}) for field in ("norm", "leaf_norm", "loss")):
            parts |= {part: np.where(is_run[name], x, 0) for part, x in parts.items()}
    names = {name: at(fields, ran) for name, fields in names.items()}
    steps, loss = steps[order][ran], loss[order][ran]
    none = np.zeros(len(steps), bool)
    # The first step of a log depends on how often it has one.
    has_start = bool(steps[0] <= 1 + 2 * np.median([0, *np.diff(steps[:9])]))
    finite = np.where(np.isinf(loss), np.nan, loss)
    of_loss = outliers(finite, is_loss=True, has_start=has_start)
    found = {
        name: {} if is_state else _outliers_of(fields, has_start, of_loss.rows)
        for name, fields in names.items()
    }
    start = (np.arange(len(steps)) < start_of(len(steps))) & has_start
    skips = [only(fields, "consecutive", none) > 0 for fields in names.values()]
    skipped = np.any(skips, axis=0)
    return Run(
        names, steps, is_state, loss, has_start, found, of_loss, start, skipped, none
    )


def _in_order(steps: np.ndarray) -> np.ndarray:
    """Return the rows by step, without those that a later attempt has repeated.

    A run that returns to a checkpoint repeats the steps after it. Writers that take
    turns repeat none, and steps that begin anew in each epoch have no such order.
    """
    rows, is_kept = np.arange(len(steps)), np.ones(len(steps), bool)
    starts = np.flatnonzero(np.diff(steps) < 0) + 1
    is_repeated = len(np.unique(steps)) < len(steps)
    if not len(starts) or (is_repeated and len(starts) > _MOST_RESTARTS):
        return rows
    # The run is where its last attempt has ended: an earlier one went on in vain.
    lasts = [*steps[starts[1:] - 1], np.inf]
    for first, last in zip(starts, lasts, strict=True):
        if is_repeated:
            is_kept[:first] &= (steps[:first] < steps[first]) | (steps[:first] > last)
    return rows[is_kept][np.argsort(steps[is_kept], kind="stable")]


def _outliers_of(
    fields: Fields, has_start: bool, explained: np.ndarray
) -> dict[str, Outliers]:
    """Return what stands out in each norm of a transformation."""
    found = {}
    for parts in filter(None, (fields.get(field) for field in ("leaf_norm", "norm"))):
        norms = np.array([*parts.values()])
        norms[~np.isfinite(norms)] = np.nan
        norms[norms < _NOISE * np.fmax.reduce(norms, axis=0)] = np.nan
        for part, x in zip(parts, norms, strict=True):
            unit = np.ones(len(x))
            if is_of_many(fields, part):
                limit = fields.get("threshold", {}).get(part, unit)
                unit = np.where((limit > 0) & np.isfinite(limit), limit, np.nan)
            each = outliers(
                x / unit, is_loss=False, has_start=has_start,
                rare=0.005 if part else 0.05, explained=explained,
            )  # fmt: skip
            found[part] = each._replace(usual=each.usual * unit)
    return found


def is_of_many(fields: Fields, part: str) -> bool:
    """Return whether a norm is the most clipped of several, and jumps between them.

    Such norms are compared with each other relative to their thresholds.
    """
    fraction = fields.get("fraction", {}).get(part, np.zeros(1))
    is_bare = not part and "" in fields.get("fraction", {})
    return is_bare or bool(np.any((fraction > 0) & (fraction < 1)))
