"""Race contenders in random order, so that noise of the machine affects all equally.

Ratios are computed per round, because noise that lasts longer than a round cancels;
their median is reported. The first calls warm up caches and check the results. They are
not timed, and a contender with a wrong result is excluded.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

Row = dict[str, Any]
# `--cpu-time` replaces it: other work of the machine changes CPU time less.
clock = time.perf_counter

# Relative errors of a norm allowed in addition to rounding: optclip's, as documented,
# and the others'. A norm summed in bfloat16 is off by a few percent, but is timed.
EXACT, CLOSE = 2e-5, 0.1
# Further untimed calls on a GPU: XLA records a graph of the kernels after one or two
# runs of a program, and an idle GPU has a low clock rate.
WARMUPS = 5


class Contender(NamedTuple):
    """Hold the call to time, its preparation and its check."""

    call: Callable[[], Any]  # runs and waits for the result
    prepare: Callable[[], Any] = lambda: None  # runs untimed before every call
    error: Callable[[Any], float] | None = None  # of the first result; None: unchecked
    facts: Mapping[str, Any] = {}  # measured without a run, such as memory


def race(
    contenders: Mapping[str, Contender],
    rounds: int,
    against: str,
    *,
    alone: bool = False,
) -> list[Row]:
    """Return a row per contender, with the ratio of its time to that of `against`.

    If `alone`, each contender is also timed in rounds of its own, in which the others
    do not change the addresses of its buffers.
    """
    errors, correct = {}, {}
    for name, each in contenders.items():
        each.prepare()
        result = each.call()
        errors[name] = {"error": each.error(result)} if each.error else {}
        most = EXACT if name.startswith("optclip") else CLOSE
        if errors[name].get("error", 0.0) <= most:
            correct[name] = each
    for _ in range(0 if jax.default_backend() == "cpu" else WARMUPS):
        for each in correct.values():
            each.prepare()
            each.call()
    samples: dict[str, list[float]] = {name: [] for name in correct}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for i in rng.permutation(len(correct)):
            name = list(correct)[i]
            samples[name].append(_prepared(correct[name]))
    medians = {
        n: _medians(x, samples.get(against), against) for n, x in samples.items()
    }
    for name, each in correct.items() if alone else ():
        medians[name]["alone ms"] = 1e3 * statistics.median(
            [_prepared(each) for _ in range(rounds)]
        )
    return [
        {"contender": n, **medians.get(n, {}), **each.facts, **errors[n]}
        for n, each in contenders.items()
    ]


def _prepared(contender: Contender) -> float:
    contender.prepare()
    return _timed(contender.call)


def _timed(call: Callable[[], Any]) -> float:
    gc.disable()
    start = clock()
    result = call()
    seconds = clock() - start
    # Freed before the next contender, which would have less memory otherwise.
    del result
    gc.enable()
    return seconds


def _medians(samples: list[float], against: list[float] | None, name: str) -> Row:
    """Return the median and quartiles in ms, and the median of the ratios per round."""
    low, middle, high = (1e3 * np.quantile(samples, (0.25, 0.5, 0.75))).tolist()
    row: Row = {"ms": middle, "quartiles": [low, high]}
    if against is not None:
        ratios = [a / b for a, b in zip(samples, against, strict=True)]
        row[f"over {name}"] = statistics.median(ratios)
    return row
