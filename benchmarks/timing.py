"""Races: contenders take turns in random order, so that a noisy machine is fair to all.

A ratio is taken round by round and then its median, because noise that lasts longer
than a round cancels in it. The first calls warm caches up and show what each contender
computes: they are not timed, and a contender that is wrong leaves the race.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

Row = dict[str, Any]

# Relative errors, beyond what rounding to the dtype explains. A norm summed in bfloat16
# is off by a few percent, and is timed all the same.
EXACT, CLOSE = 1e-6, 0.1
# Further untimed calls on a GPU: XLA runs a program once or twice before it records a
# graph of its kernels, and an idle GPU has a low clock rate.
WARMUPS = 5


class Contender(NamedTuple):
    """What to time, and what to do untimed around it."""

    call: Callable[[], Any]  # runs and waits for the result
    prepare: Callable[[], Any] = lambda: None  # before every call
    error: Callable[[Any], float] = lambda result: 0.0  # of the first result
    facts: Mapping[str, Any] = {}  # known without running, as memory


def race(
    contenders: Mapping[str, Contender],
    rounds: int,
    against: str,
    close: float = CLOSE,
) -> list[Row]:
    """Return a row for each contender, with its time over the time of one of them."""
    errors, right = {}, {}
    for name, each in contenders.items():
        each.prepare()
        errors[name] = each.error(each.call())
        if errors[name] <= (EXACT if name.startswith("optclip") else close):
            right[name] = each
    for _ in range(0 if jax.default_backend() == "cpu" else WARMUPS):
        for each in right.values():
            each.prepare()
            each.call()
    samples: dict[str, list[float]] = {name: [] for name in right}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for i in rng.permutation(len(right)):
            name = list(right)[i]
            right[name].prepare()
            samples[name].append(_timed(right[name].call))
    medians = {
        n: _medians(x, samples.get(against), against) for n, x in samples.items()
    }
    return [
        {"contender": n, **medians.get(n, {}), **each.facts, "error": errors[n]}
        for n, each in contenders.items()
    ]


def _timed(call: Callable[[], Any]) -> float:
    gc.disable()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    # Before the next contender, which would find less memory free.
    del result
    gc.enable()
    return seconds


def _medians(samples: list[float], against: list[float] | None, name: str) -> Row:
    """Milliseconds with their quartiles, and the median of the ratios by round."""
    low, middle, high = (1e3 * np.quantile(samples, (0.25, 0.5, 0.75))).tolist()
    row: Row = {"ms": middle, "quartiles": [low, high]}
    if against is not None:
        ratios = [a / b for a, b in zip(samples, against, strict=True)]
        row[f"over {name}"] = statistics.median(ratios)
    return row
