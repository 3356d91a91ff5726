"""The numbers made of a run: how it ended, and what the spikes cost it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.spikes.plan import CLEAN, Plan
from benchmarks.spikes.training import Run

SMOOTHING = 0.9
SETTLED = 20  # the first steps are high in any run


def row(run: Run, plan: Plan, unigram_loss: float) -> dict[str, Any]:
    """All that is kept of a run; each list has one number for each seed."""
    clean = plan.kinds() == CLEAN
    settled = clean & (np.arange(plan.steps) >= min(SETTLED, plan.steps // 2))
    smooth = smoothed(run.loss, clean)
    return {
        "held_out": run.held_out.tolist(),
        "worst": run.loss[:, settled].max(axis=1).tolist(),
        "lost": lost(smooth, plan),
        "lost_to": lost_to(smooth, plan),
        "rate": rate(run.metrics, plan.steps),
        "diverged": [not loss <= unigram_loss for loss in run.held_out.tolist()],
        "norm": float(np.median(run.norm[:, settled])),
        "spike_norm": float(np.median(run.norm[:, ~clean])) if plan.events() else None,
    }


def smoothed(loss: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """The running mean of the losses of clean batches; others leave it as it is."""
    found, mean = [], loss[:, 0]
    for value, is_clean in zip(loss.T, clean, strict=True):
        if is_clean:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        found.append(mean)
    return np.stack(found, axis=1)


def lost(smooth: np.ndarray, plan: Plan) -> list[int]:
    """How many steps from the first spike on are above the level before it."""
    events = plan.events()
    return _above(smooth, events[0][0], plan.steps) if events else [0] * len(smooth)


def lost_to(smooth: np.ndarray, plan: Plan) -> dict[str, list[int]]:
    """The same for each kind: from a spike to the next one, above its own level."""
    events = plan.events()
    ends = [*(step for step, _ in events), plan.steps][1:]
    found: dict[str, list[int]] = {}
    for (step, kind), end in zip(events, ends, strict=True):
        sums = found.get(kind, [0] * len(smooth))
        counts = _above(smooth, step, end)
        found[kind] = [a + b for a, b in zip(sums, counts, strict=True)]
    return found


def _above(smooth: np.ndarray, start: int, end: int) -> list[int]:
    """How many steps in a range are not at or below the level before it: NaN is not."""
    level = smooth[:, start - 1 : start]
    return (~(smooth[:, start:end] <= level)).sum(axis=1).tolist()


def rate(metrics: Mapping[str, np.ndarray], steps: int) -> list[float] | None:
    """The share of steps skipped, or else those in which the first clip did anything.

    Of groups it is the largest share of one. None if nothing clips.
    """
    if "skip/skipped" in metrics:
        return (metrics["skip/skipped"] / steps).tolist()
    rates = {key: value for key, value in metrics.items() if "/rate" in key}
    if not rates:
        return None
    first = next(iter(rates)).partition("/")[0]
    same = [value for key, value in rates.items() if key.startswith(f"{first}/")]
    return np.max(same, axis=0).tolist()
