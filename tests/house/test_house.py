"""The rooms of the package: imports go downward only."""

import ast
import inspect
import shutil
import subprocess
import sys
import typing

import optclip
from benchmarks import weight

FLOORS = (
    {"_arrays"},
    {"norms", "responses", "thresholds"},
    {"scopes"},
    {"_clip", "typing"},
    {"functional", "transforms"},
    {"monitor", "wrappers"},
    {"plot", "recipes"},
)
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor}


def test_every_room_has_a_floor():
    assert weight.rooms().keys() == FLOOR.keys()


def test_imports_go_down():
    for room, imported in weight.rooms().items():
        assert not [i for i in imported if FLOOR[i] >= FLOOR[room]], room


def test_the_longest_chain_goes_through_every_floor_once():
    assert len(weight.longest_chain()) == len(FLOORS)


def test_what_is_below_transforms_builds_none():
    """Of thresholds, one file looks whether it was given a transformation."""
    found = set()
    for path in weight.ROOT.rglob("*.py"):
        room = path.relative_to(weight.ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Import)
                and FLOOR.get(room, 9) < FLOOR["transforms"]
            ):
                found |= {(room, path.stem) for a in node.names if a.name == "optax"}
    assert found == {("thresholds", "_rule")}


def public_classes():
    modules = [
        m for m in map(vars(optclip).get, optclip.__all__) if inspect.ismodule(m)
    ]
    for module in [*modules, optclip]:
        for name in module.__all__:
            if inspect.isclass(found := getattr(module, name)):
                yield module.__name__, found


def test_classes_name_their_public_path():
    """A pickle finds them there when a file has moved, and so does who reads types."""
    found = [(path, c) for path, c in public_classes() if c.__module__ != "typing"]
    assert len(found) > 15
    for path, public in found:
        own = public.__module__
        assert own == path or getattr(sys.modules[own], public.__name__) is public
        assert not any(part.startswith("_") for part in own.split("."))
        typing.get_type_hints(public)


def test_a_plain_copy_of_the_folder_is_enough(tmp_path):
    """Vendored: no package of that name is installed, so none has a version."""
    shutil.copytree(weight.ROOT, tmp_path / "optclip")
    code = """
import importlib.metadata, sys

def find(name, of=importlib.metadata.Distribution.from_name):
    if name == "optclip":
        raise importlib.metadata.PackageNotFoundError(name)
    return of(name)

importlib.metadata.Distribution.from_name = find
sys.path.insert(0, sys.argv[1])
import optclip
print(optclip.__version__, optclip.__file__)
"""
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    copy = tmp_path / "optclip" / "__init__.py"
    assert done.stdout.split() == [optclip.__version__, str(copy)]
