"""Every parameter of every public callable refuses what it cannot use, in words."""

import dataclasses
import inspect
import re

import jax
import pytest

import optclip
from optclip import (
    functional,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    scopes,
    thresholds,
)
from tests.support import bad_input, covering

# What no user calls, or what is all abstract: nothing of theirs to refuse.
NOT_CALLED = {
    "Suggestion": "made by the library, read by the user",
    "per_example.ClippedGrad": "made by clipped_grad",
    "per_example.ExampleNorms": "made by norms",
    "per_example.Plan": "made by the library, read by the user",
    "per_example.ExampleInfo": "made by the library, read by the user",
    "per_example.QuantileState": "made by the library, read by the user",
    "Proportional": "takes no argument",
    "Tanh": "takes no argument",
    "Drop": "takes no argument",
    "Seen": "made by the library, read by the user",
    "Response": "a protocol",
    "Rule": "a protocol",
    "Scope": "abstract; what a subclass returns is in test_bad_answers.py",
}
MODULES = (
    optclip, functional, norms, per_example, plot, recipes, responses, scopes,
    thresholds,
)  # fmt: skip
PREFIXES = {
    module: f"{module.__name__.rpartition('.')[2]}."
    for module in (functional, per_example, plot, recipes)
}


def public_callables():
    """Name and callable, those of `functional` under its name."""
    for module in MODULES:
        prefix = PREFIXES.get(module, "")
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found):
                yield prefix + name, found


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A parameter of a public callable."""

    name: str
    parameter: str

    @property
    def traits(self):
        """Of what kind the callable is, each of which meets every row of a table."""
        kind = self.name.rpartition(".")[0]
        if not kind:
            kind = "thresholds" if self.name in thresholds.__all__ else self.name[:7]
        return (kind,)

    @property
    def rows(self):
        own = bad_input.BY_CALL.get((self.name, self.parameter))
        return bad_input.BY_PARAMETER.get(self.parameter, []) if own is None else own


def places():
    return sorted(
        {
            Place(name, parameter)
            for name, function in public_callables()
            if name not in NOT_CALLED
            for parameter in inspect.signature(function).parameters
        }
    )


def cases():
    """The rows of each table with the places that it is for; compiled or not."""
    tables, found = {}, []
    for place in places():
        tables.setdefault(id(place.rows), []).append(place)
    for members in tables.values():
        rows = members[0].rows
        settings = {"place": members, "row": range(len(rows))}
        chosen = (covering.product if covering.full else covering.pairs)(settings)
        rest = [case for case in covering.product(settings) if case not in chosen]
        # The first is of a kind that nothing can be done with, not even by mistake.
        chosen += [(place, i) for place, i in rest if i == 0 or rows[i].of_each]
        for number, (place, i) in enumerate(chosen):
            for compiled in (False, True):
                # Compiled it must say the same: by turns, it is one check.
                if covering.full or compiled == number % 2:
                    label = f"{place.name}-{place.parameter}-{i}"
                    found.append(pytest.param(place, rows[i], compiled, id=label))
    return found


def test_every_parameter_has_rows():
    names = {name for name, _ in public_callables()}
    assert set(NOT_CALLED) <= names
    assert [place for place in places() if not place.rows] == []
    assert {place.name for place in places()} == set(bad_input.CALLS)
    assert set(bad_input.BY_PARAMETER) <= {place.parameter for place in places()}
    pairs = {(place.name, place.parameter) for place in places()}
    assert set(bad_input.BY_CALL) <= pairs


@pytest.mark.parametrize("name", sorted(bad_input.CALLS))
def test_the_right_calls_are_right(name):
    def run():
        bad_input.CALLS[name].run()

    # Nothing need be computed to see that a call is accepted, but for what reads numbers.
    reads = name.startswith(("metrics", "plot.", "suggest", "summary"))
    run() if reads else jax.eval_shape(run)


@pytest.mark.parametrize(("place", "bad", "compiled"), cases())
def test_what_cannot_be_used_is_refused_in_words(place, bad, compiled):
    call = bad_input.CALLS[place.name]
    wrong = {place.parameter: bad.value}
    if place.parameter == "limit":
        wrong |= {"lower": None, "upper": None}
    with pytest.raises((TypeError, ValueError)) as caught:
        (jax.jit if compiled else lambda function: function)(
            lambda: call.run(**wrong)
        )()
    assert type(caught.value) is bad.error, caught.value
    said = str(caught.value)
    for pattern in (bad.given, bad.accepted, bad.remedy):
        wanted = pattern.replace("{p}", place.parameter)
        assert re.search(wanted, said, re.DOTALL), said
