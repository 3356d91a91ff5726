"""Few cases that meet every pair of settings, in place of their product.

A fault that depends on settings nearly always depends on one or two of them. So a test
of several settings runs a *covering array*: each value of each setting meets each value
of every other at least once.

    @pytest.mark.covering(entry=ENTRIES, dtype=DTYPES, run=RUNS)
    def test_matches_the_formula(entry, dtype, run): ...

With `--full` the same test runs the product. A value may have `traits`, a tuple: then
these meet the values of the other settings in its place, and the value itself comes up
at least once. The traits of an entry of the registry are its kinds of scope, response
and state, so that 26 entries by four dtypes are about 50 cases and not 104: each entry
comes up, and each scope, response and state meets each dtype.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Whether `--full` asks for the products; conftest.py sets it.
full = False
# The values of the fixture `run`: a function called as it is, or compiled.
RUNS = ("eager", "jit")

Settings = dict[str, Sequence[Any]]
# The place of each value of a case among those of its setting.
Index = tuple[int, ...]


def product(settings: Settings, where: Callable[..., bool] | None = None) -> list[Any]:
    """Every case, a tuple of values in the order of the settings."""
    return [_values(settings, index) for index in _indices(settings, where)]


def pairs(settings: Settings, where: Callable[..., bool] | None = None) -> list[Any]:
    """Cases that meet every pair that there is in the product, chosen greedily.

    Args:
      settings: the values of each setting by its name.
      where: says which cases there are; called with a value of each setting by name.

    Returns:
      Some cases of the product in its order, and the same ones every time.
    """
    goals = {index: met(settings, index) for index in _indices(settings, where)}
    missing: set[Any] = set().union(*goals.values())
    chosen = []
    while missing:
        best = max(goals, key=lambda index: len(goals[index] & missing))
        chosen.append(best)
        missing -= goals[best]
    return [_values(settings, index) for index in sorted(chosen)]


def met(settings: Settings, index: Index) -> set[Any]:
    """Each value of a case, and what of every two of them stands for a pair."""
    marks = [
        [(at, mark) for mark in getattr(value, "traits", (i,))]
        for at, (value, i) in enumerate(
            zip(_values(settings, index), index, strict=True)
        )
    ]
    two = itertools.combinations(marks, 2)
    together = {pair for left, right in two for pair in itertools.product(left, right)}
    return together | set(enumerate(index))


def _indices(settings: Settings, where: Callable[..., bool] | None) -> Iterator[Index]:
    for index in itertools.product(*(range(len(v)) for v in settings.values())):
        named = dict(zip(settings, _values(settings, index), strict=True))
        if where is None or where(**named):
            yield index


def _values(settings: Settings, index: Index) -> tuple[Any, ...]:
    return tuple(v[i] for v, i in zip(settings.values(), index, strict=True))
