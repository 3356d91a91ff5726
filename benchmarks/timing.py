"""Races: contenders take turns in random order, so that a noisy machine is fair to all.

A ratio is taken round by round and then its median, because noise that lasts longer
than a round cancels in it. The first calls warm caches up and show what each contender
computes: they are not timed, and a contender that is wrong leaves the race.
"""

import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]

# Relative errors, beyond what rounding to the dtype explains. A norm summed in bfloat16
# is off by a few percent, and is timed all the same.
EXACT, CLOSE = 1e-6, 0.1


class Contender(NamedTuple):
    """What to time, and what to do untimed around it."""

    call: Callable[[], Any]  # runs and waits for the result
    prepare: Callable[[], Any] = lambda: None  # before every call
    error: Callable[[Any], float] = lambda result: 0.0  # of the first result
    facts: Mapping[str, Any] = {}  # known without running, as memory


class Sample(NamedTuple):
    seconds: float
    faults: int


def race(contenders: Mapping[str, Contender], rounds: int, against: str) -> list[Row]:
    """A row for each contender, with its time over that of one of them."""
    errors = {name: _error_of(each) for name, each in contenders.items()}
    right = {n: c for n, c in contenders.items() if _is_right(n, errors[n])}
    samples: dict[str, list[Sample]] = {name: [] for name in right}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for i in rng.permutation(len(right)):
            name = list(right)[i]
            right[name].prepare()
            samples[name].append(_timed(right[name].call))
    return [
        {
            "contender": name,
            **_medians(samples.get(name), samples.get(against), against),
            **each.facts,
            "error": errors[name],
        }
        for name, each in contenders.items()
    ]


def _error_of(contender: Contender) -> float:
    contender.prepare()
    return contender.error(contender.call())


def _is_right(name: str, error: float) -> bool:
    return error <= (EXACT if name.startswith("optclip") else CLOSE)


def _timed(call: Callable[[], Any]) -> Sample:
    gc.disable()
    before, start = page_faults(), time.perf_counter()
    result = call()
    sample = Sample(time.perf_counter() - start, page_faults() - before)
    # Before the next contender, which would find less memory free.
    del result
    gc.enable()
    return sample


def page_faults() -> int:
    """Minor page faults of this process so far: each fresh 4 KB page is one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _medians(
    samples: list[Sample] | None, against: list[Sample] | None, name: str
) -> Row:
    """Milliseconds with their quartiles, page faults, and the median ratio."""
    if samples is None:
        return {"ms": None}
    ms = [1e3 * sample.seconds for sample in samples]
    low, middle, high = np.quantile(ms, (0.25, 0.5, 0.75))
    row = {"ms": middle, "quartiles": [low, high]}
    if against is not None:
        row[f"over {name}"] = ratio(samples, against)
    return {**row, "page faults": statistics.median(s.faults for s in samples)}


def ratio(above: list[Sample], below: list[Sample]) -> float:
    """The median of the ratios by round."""
    pairs = zip(above, below, strict=True)
    return statistics.median(a.seconds / b.seconds for a, b in pairs)
