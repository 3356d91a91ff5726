"""Which pairs a covering array meets: all that there are, in few cases."""

import importlib
import itertools
import pathlib

import pytest

from tests.support import covering, helpers
from tests.support.registry import ENTRIES, SCALAR

CONTRACTS = [
    pathlib.Path(__file__).with_name(f"test_{name}.py")
    for name in ("jax", "leaves", "optax", "values")
]
SETTINGS = {"entry": ENTRIES, "dtype": ("a", "b", "c", "d"), "run": covering.RUNS}


def missed(settings, cases, where=None):
    """Pairs of the product that these cases do not meet, each named."""
    return named_pairs(covering.product(settings, where)) - named_pairs(cases)


def named_pairs(cases):
    """Values by their identity, or by their traits: written anew, not as in covering."""
    found = set()
    for case in cases:
        names = [getattr(x, "traits", (id(x),)) for x in case]
        found |= {(at, id(x)) for at, x in enumerate(case)}
        for (i, left), (j, right) in itertools.combinations(enumerate(names), 2):
            found |= {(i, a, j, b) for a in left for b in right}
    return found


def test_every_pair_is_met_by_few():
    cases = covering.pairs(SETTINGS)
    assert not missed(SETTINGS, cases)
    assert {id(case[0]) for case in cases} == {id(entry) for entry in ENTRIES}
    assert len(cases) < len(covering.product(SETTINGS)) / 3
    # And by the fields themselves, of which two may have one name.
    for at, values in ((1, SETTINGS["dtype"]), (2, covering.RUNS)):
        for field in ("scope", "response"):
            named = {getattr(entry, field) for entry in ENTRIES}
            met = {(getattr(case[0], field), case[at]) for case in cases}
            assert met == set(itertools.product(named, values))


def test_plain_settings_meet_one_another():
    """Three settings of three values: nine cases at best, and 27 in all."""
    settings = {name: (f"{name}1", f"{name}2", f"{name}3") for name in "abc"}
    cases = covering.pairs(settings)
    assert not missed(settings, cases)
    assert 9 <= len(cases) <= 12
    assert len(covering.product(settings)) == 27
    assert missed(settings, cases[1:])


def test_only_the_cases_that_there_are():
    settings = {"a": (1, 2, 3), "b": (1, 2, 3)}
    where = lambda a, b: a <= b  # noqa: E731
    cases = covering.pairs(settings, where)
    assert all(a <= b for a, b in cases)
    assert not missed(settings, cases, where)


def test_the_same_cases_every_time():
    assert covering.pairs(SETTINGS) == covering.pairs(SETTINGS)


def test_contracts_are_found():
    assert len(CONTRACTS) == 4


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.stem)
def test_every_contract_is_of_every_entry(path):
    """A contract that picks its own clips would miss the next one that is registered."""
    module = importlib.import_module(f"tests.contracts.{path.stem}")
    tests = {name: x for name, x in vars(module).items() if name.startswith("test_")}
    assert tests
    for name, test in tests.items():
        marks = getattr(test, "pytestmark", [])
        covered = [m.kwargs.get("entry") for m in marks if m.name == "covering"]
        assert covered in ([ENTRIES], [SCALAR]), name


# These are about arguments, wrappers or kinds of leaf, not about what is in a leaf.
OF_ONE_DTYPE = {
    "test_a_flattened_tree_is_clipped_as_one_leaf",
    "test_complex_leaves_are_clipped_by_the_modulus",
    "test_empty_trees_and_leaves_are_taken",
    "test_every_kind_of_threshold_is_the_same",
    "test_float64_is_clipped_in_float64",
    "test_infinite_threshold_touches_nothing",
    "test_it_clips_before_and_after_adam",
    "test_jit_is_eager",
    "test_no_leaf_kind_is_dropped_from_a_string",
    "test_no_tracer_leaks",
    "test_orbax_restores_the_state",
    "test_other_leaves_pass_untouched",
    "test_python_scalars_come_back_as_jax_makes_them",
    "test_update_called_again_outside_jit_compiles_nothing",
}


def test_every_other_contract_is_of_every_dtype():
    found = set()
    for path in CONTRACTS:
        module = importlib.import_module(f"tests.contracts.{path.stem}")
        for name, test in vars(module).items():
            settings = [m.kwargs for m in getattr(test, "pytestmark", [])]
            if name.startswith("test_") and not any(
                {*helpers.KINDS} <= {*each.get("kind", ())}
                or {*helpers.DTYPES} <= {*each.get("dtype", ())}
                for each in settings
            ):
                found.add(name)
    assert found == OF_ONE_DTYPE


@pytest.mark.covering(a=("x", "y"), b=(1, 2))
def test_a_marked_test_is_given_its_settings(a, b):
    assert (a, b) in itertools.product("xy", (1, 2))
