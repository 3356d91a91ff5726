"""Choose few cases that cover every pair of settings, instead of their product.

A fault that depends on settings nearly always depends on one or two of them. A test of
several settings therefore runs a *covering array*, in which each value of each setting
occurs with each value of every other setting at least once.

    @pytest.mark.covering(entry=ENTRIES, dtype=DTYPES, run=RUNS)
    def test_matches_the_formula(entry, dtype, run): ...

With `--full` the test runs the product. A value may have a tuple of `traits`, which
then replace it in the pairs; the value itself occurs at least once. The traits of a
registry entry are its kinds of scope, response and state: with four dtypes, 26 entries
have about 50 cases instead of 104.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Whether pytest runs with `--full`; conftest.py sets it.
full = False
# The values of the fixture `run`: call a function uncompiled or compiled.
RUNS = ("eager", "jit")

Settings = dict[str, Sequence[Any]]
# The index of each value of a case in its setting.
Index = tuple[int, ...]


def product(settings: Settings, where: Callable[..., bool] | None = None) -> list[Any]:
    """Return every case as a tuple of values in the order of the settings."""
    return [_values(settings, index) for index in _indices(settings, where)]


def pairs(settings: Settings, where: Callable[..., bool] | None = None) -> list[Any]:
    """Choose cases greedily that cover every pair of the product.

    Args:
      settings: The values of each setting by name.
      where: Whether a case is valid; called with a value of each setting by name.

    Returns:
      Cases of the product in its order; deterministic.
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
    """Return the values and the pairs that a case covers."""
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
