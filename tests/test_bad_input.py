"""Every parameter of every public callable refuses what it cannot use, in words."""

import inspect
import re

import jax
import pytest

import optclip
from optclip import functional, norms, plot, recipes, responses, scopes, thresholds
from tests import bad_input

# What no user calls, or what is all abstract: nothing of theirs to refuse.
NOT_CALLED = {
    "ClipRecord": "made by the library, read by the user",
    "ClipState": "made by the library, read by the user",
    "SkipRecord": "made by the library, read by the user",
    "Suggestion": "made by the library, read by the user",
    "Proportional": "takes no argument",
    "Tanh": "takes no argument",
    "Drop": "takes no argument",
    "Measured": "made by the library, read by the user",
    "Seen": "made by the library, read by the user",
    "Response": "a protocol",
    "Rule": "a protocol",
    "Scope": "abstract; what a subclass returns is in test_bad_answers.py",
}
MODULES = (optclip, functional, norms, plot, recipes, responses, scopes, thresholds)
PREFIXES = {functional: "functional.", plot: "plot.", recipes: "recipes."}


def public_callables():
    """Name and callable, those of `functional` under its name."""
    for module in MODULES:
        prefix = PREFIXES.get(module, "")
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found):
                yield prefix + name, found


def pairs():
    return sorted(
        {
            (name, parameter)
            for name, function in public_callables()
            if name not in NOT_CALLED
            for parameter in inspect.signature(function).parameters
        }
    )


def rows_of(pair):
    return bad_input.BY_CALL.get(pair, bad_input.BY_PARAMETER.get(pair[1], []))


ROWS = [
    pytest.param(name, parameter, bad, id=f"{name}-{parameter}-{i}")
    for name, parameter in pairs()
    for i, bad in enumerate(rows_of((name, parameter)))
]


def test_every_parameter_has_rows():
    names = {name for name, _ in public_callables()}
    assert set(NOT_CALLED) <= names
    assert [pair for pair in pairs() if not rows_of(pair)] == []
    assert {name for name, _ in pairs()} == set(bad_input.CALLS)
    used = {parameter for _, parameter in pairs()}
    assert set(bad_input.BY_PARAMETER) <= used
    assert set(bad_input.BY_CALL) <= set(pairs())


@pytest.mark.parametrize("name", sorted(bad_input.CALLS))
def test_the_right_calls_are_right(name):
    bad_input.CALLS[name].run()


@pytest.mark.parametrize(("name", "parameter", "bad"), ROWS)
def test_refused_in_words(name, parameter, bad):
    call = bad_input.CALLS[name]
    wrong = {parameter: bad.value}
    if parameter == "limit":
        wrong |= {"lower": None, "upper": None}
    # Compiled it must say the same: nothing here is looked at only when it runs.
    for run in (lambda: call.run(**wrong), jax.jit(lambda: call.run(**wrong))):
        with pytest.raises((TypeError, ValueError)) as caught:
            run()
        assert type(caught.value) is bad.error, caught.value
        said = str(caught.value)
        for pattern in (bad.given, bad.accepted, bad.remedy):
            assert re.search(pattern.replace("{p}", parameter), said, re.DOTALL), said
