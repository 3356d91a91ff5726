"""The docstring of each public function explains each of its parameters."""

import inspect
import re

import pytest

import optclip

MODULES = (optclip, *filter(inspect.ismodule, map(vars(optclip).get, optclip.__all__)))
# A reader who hovers over a name should not have to look elsewhere.
ELSEWHERE = re.compile(r"\blikewise\b|see `clip_by`", re.IGNORECASE)
FEWEST_WORDS = 4


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
    pairs = (part.partition(": ") for part in parts)
    return {name: " ".join(text.split()) for name, _, text in pairs}


@pytest.mark.parametrize("path", CALLED)
def test_docstring_explains_each_parameter(path):
    texts = entries(inspect.getdoc(PUBLIC[path]))
    assert list(texts) == list(inspect.signature(PUBLIC[path]).parameters)
    for name, text in texts.items():
        assert len(text.split()) >= FEWEST_WORDS, name
        assert "as in " not in text, name


def test_docstrings_refer_to_no_other_and_cover_the_package():
    assert not [p for p, x in PUBLIC.items() if ELSEWHERE.search(inspect.getdoc(x))]
    assert len(CALLED) > 70
    assert {path.split(".")[1] for path in CALLED} > {"functional", "recipes", "plot"}
