"""Choose few cases that cover every pair of settings, instead of their product.

A fault that depends on settings nearly always depends on one or two of them. A test of
several settings therefore runs a *covering array*, in which each value of each setting
occurs with each value of every other setting at least once.

    @pytest.mark.covering(entry=ENTRIES, dtype=DTYPES, run=RUNS)
    def test_matches_the_formula(entry, dtype, run): ...

With `--full` the test runs the product. A value may have a tuple of `traits`, which
then replace it in the pairs; the value itself occurs at least once. The traits of a
registry entry are its kinds of scope, response and state: with four dtypes, 27 entries
have about 50 cases instead of 108.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

# Whether pytest runs with `--full`; conftest.py sets it.
full = False
# The values of the fixture `run`: call a function uncompiled or compiled.
RUNS = ("eager", "jit")

Settings = dict[str, Sequence[Any]]
Case = tuple[Any, ...]


def product(settings: Settings, where: Callable[..., bool] | None = None) -> list[Case]:
    """Return every valid case as a tuple of values in the order of the settings."""
    return [
        case
        for case in itertools.product(*settings.values())
        if where is None or where(**dict(zip(settings, case, strict=True)))
    ]


def rotated(values: Sequence[Any], at: int) -> Sequence[Any]:
    """Return one value, the next for each `at`; with `--full` all of them.

    For a contract of two settings that seldom interact: each value of both is tried.
    """
    return values if full else [values[at % len(values)]]


def pairs(settings: Settings, where: Callable[..., bool] | None = None) -> list[Case]:
    """Choose cases greedily that cover every pair of the product.

    Args:
      settings: The values of each setting by name.
      where: Whether a case is valid; called with a value of each setting by name.

    Returns:
      Cases of the product in its order; deterministic.
    """
    cases = product(settings, where)
    goals = [met(case) for case in cases]
    missing: set[Any] = set().union(*goals)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(goals[i] & missing))
        chosen.append(best)
        missing -= goals[best]
    return [cases[i] for i in sorted(chosen)]


def met(case: Case) -> set[Any]:
    """Return the values and the pairs that a case covers."""
    # Equal values, such as 1 and 1.0, are different ones.
    ids = [(id(value),) for value in case]
    marks = [getattr(x, "traits", own) for x, own in zip(case, ids, strict=True)]
    marked = [[(at, mark) for mark in each] for at, each in enumerate(marks)]
    together = itertools.starmap(itertools.product, itertools.combinations(marked, 2))
    return set(enumerate(ids)).union(*together)
