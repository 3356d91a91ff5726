"""Races: contenders take turns in random order, so that a noisy machine is fair to all.

A ratio is taken round by round and then its median, because noise that lasts longer
than a round cancels in it. The first round, which warms caches up, is dropped.
"""

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Contender(NamedTuple):
    """What to time, and what to do untimed around it."""

    call: Callable[[], Any]  # runs and waits for the result
    prepare: Callable[[], Any] = lambda: None  # fresh numbers, before every call
    inspect: Callable[[Any], dict[str, Any]] = lambda result: {}  # of the first result
    facts: Mapping[str, Any] = {}  # known without running, as memory


class Spread(NamedTuple):
    """A median, the quartiles about it, and what else is known of it."""

    median: float
    low: float
    high: float
    num_samples: int = 0  # 0 for a number that is the same in each run
    sure: tuple[float, float] | None = None  # holds the true median, at 95 %


def page_faults() -> int:
    """Minor page faults of this process so far: each fresh 4 KB page is one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def race(
    contenders: Mapping[str, Contender], rounds: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Seconds and page faults of each contender by round, with what else is known."""
    rng, names = np.random.default_rng(seed), list(contenders)
    results: dict[str, dict[str, Any]] = {
        name: {**contenders[name].facts, "seconds": [], "faults": []} for name in names
    }
    for number in range(rounds + 1):
        for i in rng.permutation(len(names)):
            contender, row = contenders[names[i]], results[names[i]]
            contender.prepare()
            seconds, faults, result = _timed(contender.call)
            if number == 0:
                row.update(contender.inspect(result))
            else:
                row["seconds"].append(seconds)
                row["faults"].append(faults)
            del result  # or the next contender would find less memory free
    return results


def _timed(call: Callable[[], Any]) -> tuple[float, int, Any]:
    """Seconds, page faults and result of one call."""
    gc.disable()
    before, start = page_faults(), time.perf_counter()
    result = call()
    seconds, faults = time.perf_counter() - start, page_faults() - before
    gc.enable()
    return seconds, faults, result


def spread(samples: Sequence[float]) -> Spread:
    """The median and quartiles of some samples."""
    low, high = (float(x) for x in np.quantile(samples, (0.25, 0.75)))
    sure = _interval_of_the_median(sorted(samples))
    return Spread(statistics.median(samples), low, high, len(samples), sure)


def exactly(x: float) -> Spread:
    """What is counted, not timed."""
    return Spread(x, x, x)


def _interval_of_the_median(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The samples that at least 95 % of the time have the true median between them.

    The true median is below k or fewer of n samples as often as n fair coins show k or
    fewer heads; no distribution is assumed. Five samples or fewer do not tell.
    """
    n, seldom, k = len(ordered), 0.0, -1
    while seldom + math.comb(n, k + 1) / 2**n <= 0.025:
        k += 1
        seldom += math.comb(n, k) / 2**n
    return (ordered[k], ordered[n - 1 - k]) if k >= 0 else None


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The spread of per-round ratios."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def smaller(*samples: Sequence[float] | None) -> list[float]:
    """The least by round, of those that ran."""
    ran = [each for each in samples if each]
    return [min(each) for each in zip(*ran, strict=True)]


def added(*samples: Sequence[float]) -> list[float]:
    """Sums by round, of executables that together are one floor."""
    return [sum(each) for each in zip(*samples, strict=True)]
