"""What an editor shows of a public function explains each of its parameters there."""

import inspect
import re

import pytest

import optclip

MODULES = (optclip, *filter(inspect.ismodule, map(vars(optclip).get, optclip.__all__)))
# What sends who hovers over a name somewhere else.
ELSEWHERE = re.compile(r"\blikewise\b|see `clip_by`", re.IGNORECASE)
FEWEST = 4


def documented():
    """Every public function and class by its path, but types for annotations."""
    for module in MODULES:
        for name in module.__all__:
            found = getattr(module, name)
            is_ours = getattr(found, "__module__", "").startswith("optclip")
            if is_ours and (inspect.isfunction(found) or inspect.isclass(found)):
                yield f"{module.__name__}.{name}", found


PUBLIC = dict(documented())


def has_parameters(found):
    """Whether one calls it: no protocol, and no dict of types."""
    is_type = getattr(found, "_is_protocol", False) or hasattr(found, "__total__")
    return not is_type and bool(inspect.signature(found).parameters)


CALLED = [path for path, found in PUBLIC.items() if has_parameters(found)]


def entries(doc):
    """The texts of the parameters in the section `Args` or `Attributes`, by name."""
    section = re.search(r"^(?:Args|Attributes):\n((?:  .*\n|\n)+)", f"{doc}\n", re.M)
    parts = re.split(r"^  (?=\S)", section[1], flags=re.M)[1:] if section else []
    pairs = (part.partition(": ") for part in parts)
    return {name: " ".join(text.split()) for name, _, text in pairs}


@pytest.mark.parametrize("path", CALLED)
def test_each_parameter_has_a_clause_of_its_own(path):
    found = entries(inspect.getdoc(PUBLIC[path]))
    assert list(found) == list(inspect.signature(PUBLIC[path]).parameters)
    for name, text in found.items():
        assert len(text.split()) >= FEWEST, name
        assert "as in " not in text, name


@pytest.mark.parametrize("path", PUBLIC)
def test_it_sends_nobody_to_another_docstring(path):
    assert not ELSEWHERE.search(inspect.getdoc(PUBLIC[path]))


def test_all_of_the_package_is_looked_at():
    assert len(CALLED) > 70
    assert {path.split(".")[1] for path in CALLED} > {"functional", "recipes", "plot"}


def test_entries_that_go_over_lines_are_read_whole():
    doc = "One.\n\nArgs:\n  a: what is\n    kept.\n  b: 1.\n\nReturns:\n  c: it."
    assert entries(doc) == {"a": "what is kept.", "b": "1."}
    assert entries("One.") == {}
