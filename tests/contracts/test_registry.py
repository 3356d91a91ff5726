"""Every public name is in the registry, and signatures equal `public_api.txt`."""

import dataclasses
import pathlib
import re
import sys

import optclip
from tests.support.registry import ENTRIES, OTHER_NAMES
from tools import public_api

FACTORIES = {entry.factory for entry in ENTRIES}


def test_public_names_are_registered_and_in_their_test_file():
    registered = {factory.__name__ for factory in FACTORIES} | set(OTHER_NAMES)
    assert set(optclip.__all__) == registered
    public = {name for name in vars(optclip) if not name.startswith("_")}
    # The modules of named clips and wrappers are reached through their functions.
    folders = {
        "attention", "cotangents", "monitor", "spectral", "transforms", "wrappers",
    }  # fmt: skip
    assert public - folders == registered
    here = pathlib.Path(__file__).parents[1]
    for name, file in OTHER_NAMES.items():
        text = "".join(path.read_text() for path in here.rglob(file))
        assert re.search(rf"\b{name}\b", text), (name, file)


def test_public_api_equals_written_file():
    """`python -m tools.public_api` writes the file: a changed default is reviewed."""
    lines, written = public_api.text().split(), public_api.FILE.read_text().split()
    assert lines == written, "Run `python -m tools.public_api` and review the change."


def test_public_dataclasses_are_frozen():
    """`jit` would not notice a rule or scope that changes after its first call."""
    modules = [m for name, m in sys.modules.items() if name.startswith("optclip")]
    members = {
        x for m in modules for x in vars(m).values() if dataclasses.is_dataclass(x)
    }
    classes = [x for x in members if isinstance(x, type)]
    assert len(classes) > 20
    assert not [x for x in classes if not x.__dataclass_params__.frozen]
