"""Covering arrays cover every pair, and contracts every entry of the registry."""

import importlib
import itertools

import pytest

from tests.support import covering
from tests.support.registry import ENTRIES, SCALAR

SETTINGS = {"entry": ENTRIES, "dtype": ("a", "b", "c", "d"), "run": covering.RUNS}


def missed(settings, cases, where=None):
    """Return the pairs of the product that these cases do not meet."""
    return named_pairs(covering.product(settings, where)) - named_pairs(cases)


def named_pairs(cases):
    """Name the pairs by identity or traits, independently of `covering`."""
    pairs = set()
    for case in cases:
        names = [getattr(x, "traits", (id(x),)) for x in case]
        pairs |= {(at, id(x)) for at, x in enumerate(case)}
        for (i, left), (j, right) in itertools.combinations(enumerate(names), 2):
            pairs |= {(i, a, j, b) for a in left for b in right}
    return pairs


@pytest.mark.parametrize(
    ("settings", "where", "most"),
    [
        (SETTINGS, None, len(covering.product(SETTINGS)) // 3),
        # Nine cases at best, and 27 in all.
        ({name: (f"{name}1", f"{name}2", f"{name}3") for name in "abc"}, None, 12),
        ({"a": (1, 2, 3), "b": (1, 2, 3)}, lambda a, b: a <= b, 6),
    ],
    ids=["traits", "plain", "where"],
)
def test_pairs_meet_every_pair_in_few_cases(settings, where, most):
    cases = covering.pairs(settings, where)
    assert cases == covering.pairs(settings, where)
    assert set(cases) <= set(covering.product(settings, where))
    assert not missed(settings, cases, where)
    assert missed(settings, cases[1:], where)
    assert len(cases) <= most


def traits_of(entries):
    return {trait for entry in entries for trait in entry.traits}


@pytest.mark.parametrize("name", ["jax", "leaves", "optax", "values"])
def test_contract_covers_every_entry_and_trait(name):
    """A contract with its own list would miss newly registered transformations."""
    module = importlib.import_module(f"tests.contracts.test_{name}")
    tests = {name: x for name, x in vars(module).items() if name.startswith("test_")}
    # All entries are in one checkpoint.
    tests.pop("test_orbax_restores_the_state_of_every_entry", None)
    tested = []
    for name, test in tests.items():
        marks = getattr(test, "pytestmark", [])
        entries = [m.kwargs["entry"] for m in marks if m.name == "covering"]
        entries += [m.args[1] for m in marks if m.name == "parametrize"]
        assert len(entries) == 1, name
        tested += entries
        # Rules have no number as threshold to set.
        traits = [traits_of(ENTRIES), traits_of(SCALAR)]
        assert traits_of(entries[0]) in traits, name
    assert ENTRIES in tested


@pytest.mark.covering(a=("x", "y"), b=(1, 2))
def test_marked_test_gets_its_settings(a, b):
    assert (a, b) in itertools.product("xy", (1, 2))
