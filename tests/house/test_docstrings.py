"""Public docstrings begin with a verb and name each parameter."""

import inspect
import re
import typing

import pytest

import optclip

MODULES = (optclip, *filter(inspect.ismodule, map(vars(optclip).get, optclip.__all__)))
VERBS = set(
    re.findall(
        r"\w+",
        """
    Accumulate Add Adapt Aggregate Apply Attach Average Bound Build Cap Choose Clip
    Combine Compare Compute Convert Count Create Cut Declare Describe Divide Draw Drop
    Estimate Exclude Find Follow Format Group Hold Keep Learn List Load Locate Make Map Mark
    Measure Move Multiply Name Normalize Plot Print Read Record Reject Release Repeat Replace
    Represent Require Reset Return Run Save Scale Select Share Shrink Skip Split State
    Store Suggest Sum Summarize Track Trim Use Wrap Write Zero
    """,
    )
)


def documented():
    """Yield each public function and class with its path, except types."""
    for module in MODULES:
        for name in module.__all__:
            member = getattr(module, name)
            is_ours = getattr(member, "__module__", "").startswith("optclip")
            if is_ours and (inspect.isfunction(member) or inspect.isclass(member)):
                yield f"{module.__name__}.{name}", member


PUBLIC = dict(documented())


def has_parameters(member):
    """Return whether users call it: not a protocol, nor a dict of types."""
    is_type = getattr(member, "_is_protocol", False) or hasattr(member, "__total__")
    return not is_type and bool(inspect.signature(member).parameters)


CALLED = [path for path, member in PUBLIC.items() if has_parameters(member)]


def entries(doc):
    """Return the texts of the section `Args` or `Attributes` by parameter."""
    section = re.search(r"^(?:Args|Attributes):\n((?:  .*\n|\n)+)", f"{doc}\n", re.M)
    parts = re.split(r"^  (?=\S)", section[1], flags=re.M)[1:] if section else []
    pairs = (part.lstrip("*").partition(": ") for part in parts)
    return {name: " ".join(text.split()) for name, _, text in pairs}


# The site shows such text as part of the section.
AFTER_GUARANTEES = r"^(Guarantees|Edge cases):\n(  .*\n|\n)+(?!\w[\w ]*:\n)\w"


@pytest.mark.parametrize("path", CALLED)
def test_docstring_begins_with_verb_and_names_each_parameter(path):
    doc = inspect.getdoc(PUBLIC[path])
    assert doc.split()[0] in VERBS
    assert doc.splitlines()[0].endswith(".")
    assert not re.search(AFTER_GUARANTEES, doc, re.MULTILINE)
    assert list(entries(doc)) == list(inspect.signature(PUBLIC[path]).parameters)


def test_docstrings_cover_the_package():
    assert len(CALLED) > 70
    assert {path.split(".")[1] for path in CALLED} > {"functional", "recipes", "plot"}


@pytest.mark.parametrize("path", CALLED)
def test_types_of_signature_can_be_evaluated(path):
    member = PUBLIC[path]
    # Pickles still load after the file of a class has moved.
    assert not (inspect.isclass(member) and "._" in member.__module__)
    typing.get_type_hints(member)
