"""Compare a step with its recorded run: is it reproduced, and is it unusual?"""

from __future__ import annotations

import math

import numpy as np

from .._monitor import listed, outliers, ranges, stands_out
from ._explanation import named
from ._recorded import LEAF, LOSS, NORM, STEP, Key, Numbers

# Recomputed in another program, norms of four models differ by at most 7e-6 in float32,
# and by 3e-3 in bfloat16 with another number of examples at a time; norms of leaves,
# relative to at least a tenth of the whole, by 1.4e-5 and 1e-2; losses of three models
# by 2.4e-6, and by 2.2e-3 if their mean is in bfloat16. The limits are larger: matrix
# products of float32 on other devices round like bfloat16.
_TOLERANCE, _LEAST = {"loss": 0.005, "norm": 0.02, LEAF: 0.05}, 0.1
# The record has 0 for norms below this.
_ZERO = 2.0**-60
# The number of rows before the step whose median is usual.
_NEIGHBORS = 64
# Another seed changes the loss and norms of a large batch by little, so that a leaf is
# off by half, ten times its tolerance, before it points at hardware. If the loss
# differs, norms must be equal within a tenth.
_FAR, _NEAR = 10, 0.1

_OTHER_NORM = (
    "unless the recorded norm is not the L2 norm of this gradient (another norm, a"
    " mask, or a transformation before it, such as weight decay)."
)
# Where to look, by the numbers that are equal.
_ADVICE = {
    "unknown": f"Look at hardware, random seeds or other parameters, {_OTHER_NORM}",
    "nothing": (
        "Look at random seeds, another batch or loss, or other parameters, as after a"
        " fault in an earlier step."
    ),
    "loss": f"Look at hardware or random seeds, {_OTHER_NORM}",
    "loss and leaves": (
        "Other leaves are reproduced too: hardware is the likely cause, unless a"
        " transformation before clipping changes these leaves only."
    ),
}


def usual_of(before: Numbers) -> Numbers:
    """Return the median of the last losses and norms; norms of 0 are none."""
    usual = {}
    for key, numbers in before.items():
        is_usual = np.isfinite(numbers) & ((numbers > 0) | (key == LOSS))
        if is_usual.any():
            usual[key] = float(np.median(numbers[is_usual][-_NEIGHBORS:]))
    return usual


def compared(
    before: Numbers, row: Numbers, step: int | None, losses: np.ndarray, leaves: Numbers
) -> tuple[list[str], bool | None]:
    """Return sentences on the step and the batch, and whether it is reproduced.

    Args:
      before: Recorded losses and norms of the earlier rows.
      row: Recorded loss and norms of the step.
      step: Number of the step, or None.
      losses: Losses of the step, `(batch,)` or `(batch, positions)`.
      leaves: Norm of each leaf of the gradient.
    """
    means = losses.reshape(len(losses), -1).mean(1)
    loss = {LOSS: float(means.mean())}
    findings, reproduced = [], None
    if step is not None:
        new = loss | leaves | _norm(row, leaves)
        findings, reproduced = _reproduction(step, before, row, new)
    # The norms of a run with another gradient are no measure for this one.
    new = loss | (_norm(before, leaves) if reproduced is not False else {})
    usual = usual_of({key: before[key] for key in new if key in before})
    high = [key for key in usual if _is_high(new[key], before[key], key, step)]
    return [*findings, *_of_batch(means, new, usual, high)], reproduced


def _norm(recorded: Numbers, leaves: Numbers) -> Numbers:
    """Return the norm over the leaves that are recorded, or else over all leaves."""
    norms = [leaves[key] for key in recorded if key in leaves] or [*leaves.values()]
    return {NORM: float(np.hypot.reduce(norms))}


def _reproduction(
    step: int, before: Numbers, row: Numbers, new: Numbers
) -> tuple[list[str], bool | None]:
    """Return sentences on a recorded row, and whether it is reproduced."""
    if not row:
        return [f"Step {step} has neither a loss nor a norm of its own."], None
    off = [key for key in row if not _is_same(row, new, key)]

    def both(key: Key, what: str = "") -> str:
        return f"recorded {what}{_text(row[key])}, recomputed {_text(new[key])}"

    # The recorded loss may be that of one microbatch, or have another term.
    is_sure = all(_is_same(row, new, key, _NEAR) for key in row if key != LOSS)
    if not off or (off == [LOSS] and NORM in row and is_sure):
        equal = [key for key in (LOSS, NORM) if key in row and key not in off]
        text = ", ".join(f"{key[0]} {_text(new[key])}" for key in equal)
        text += f" ({both(NORM)}); its loss is not: {both(LOSS)}" if off else ""
        text += "" if NORM in row else "; it has no L2 norm of its own"
        return [f"Step {step} is reproduced: {text}."], True
    leaves, count = [k for k in off if k[0] == LEAF], sum(k[0] == LEAF for k in row)
    judged, other = (LOSS, NORM) if off == [LOSS] else (NORM, LOSS)
    text = (
        f"Step {step}: {both(judged, f'{judged[0]} ')}: not reproducible from these"
        " parameters and this batch. "
    )
    if leaves:
        each = listed([f"{named(key[1])} ({both(key)})" for key in leaves])
        text += f"Leaves that differ: {len(leaves)} of {count}, {each}. "
    if other in row:
        verb = "differs too" if other in off else "is close"
        text += f"Its {other[0]} {verb}: {both(other)}. "
    same = "nothing" if LOSS in off else "loss" if LOSS in row else "unknown"
    # Any gradient has small leaves of about the recorded norm.
    large = {k for k in row if k[0] == LEAF and row[k] > _LEAST * new[NORM]}
    is_far = any(not _is_same(row, new, key, _FAR) for key in leaves)
    same += " and leaves" if same == "loss" and is_far and large - {*off} else ""
    text += _ADVICE[same]
    return [text, *(_of_earlier(before) if "loss" not in same else [])], False


def _of_earlier(before: Numbers) -> list[str]:
    """Return the sentence of the applied step with the largest unusual norm."""
    steps, norms = before[STEP], before.get(NORM, np.zeros(0))
    rows = np.flatnonzero(outliers(norms, is_loss=False, has_start=True).rows)
    rows = rows[np.isfinite(steps[rows])]
    largest = rows[np.argsort(-norms[rows])][:1]
    return [
        f"Step {steps[i]:.0f} has norm {norms[i]:.4g}: replay that step first."
        for i in largest
    ]


def _is_same(row: Numbers, new: Numbers, key: Key, times: float = 1) -> bool:
    """Return whether two numbers differ by rounding only, or are both not finite.

    The tolerance is multiplied by `times`.
    """
    # Larger numbers are recorded as inf.
    finite = [abs(x) <= np.finfo(np.float32).max for x in (row[key], new[key])]
    if not all(finite):
        return not any(finite)
    tolerance = times * _TOLERANCE[key[0]]
    least = tolerance * _LEAST * new[NORM] if key[0] == LEAF else 0.0
    return math.isclose(row[key], new[key], rel_tol=tolerance, abs_tol=least + _ZERO)


def _text(number: float) -> str:
    return f"{number:.4g}" if np.isfinite(number) else "not finite"


def _of_batch(
    means: np.ndarray, new: Numbers, usual: Numbers, high: list[Key]
) -> list[str]:
    """Return the sentence of a batch with an unusual mean loss or norm.

    Args:
      means: Loss of each example.
      new: Mean loss and norm.
      usual: Usual loss and norm, where they are known.
      high: Which of them are unusual.
    """
    if not high:
        return []
    phrases = [
        f"{name} {new[key]:.4g}, usually {usual[key]:.4g}"
        for name, key in (("mean loss", LOSS), ("norm", NORM))
        if key in usual
    ]
    advice = ""
    if LOSS in high:
        middle = (new[LOSS] + usual[LOSS]) / 2
        number, count, lowest = np.sum(means > middle), len(means), np.min(means)
        phrases.append(
            f"all {count} examples lie between {lowest:.3g} and {np.max(means):.3g}"
            if number == count
            else f"{number} of {count} examples above {middle:.3g}:"
            f" {ranges(means > middle, np.arange(count))}"
        )
        if 2 * number > count:
            advice = (
                " Look at the source of this batch; if other batches are as high, at"
                " the parameters."
            )
    return [f"The whole batch: {'; '.join(phrases)}.{advice}"]


def _is_high(number: float, before: np.ndarray, key: Key, step: int | None) -> bool:
    """Return whether a finite loss or norm stands out from the rows before a step.

    Without a step, the batch may belong to any row, so that it must also stand out from
    the largest ones after the start.
    """
    largest = [np.sort(before[len(before) // 10 :])] if step is None else []
    return bool(np.isfinite(number)) and all(
        stands_out(number, each, is_loss=key == LOSS) for each in [before, *largest]
    )
