"""Check the folders: imports go down, to what neighbors export; faces are public."""

import ast
import pathlib
import re

import pytest

import optclip
from tests.house import imports

CHECKOUT = pathlib.Path(__file__).parents[2]
FILES = [*imports.ROOT.rglob("*.py")]
FACES = {
    name: imports.ROOT / f"{name}.py"
    for name in optclip.__all__
    if (imports.ROOT / f"{name}.py").exists()
}


def table():
    """Return the rows of CONTRIBUTING.md's table, from the bottom up."""
    page = (CHECKOUT / "CONTRIBUTING.md").read_text()
    rows = page.split("| part of `optclip` |")[1].split("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows][::-1]


def test_table_of_contributing_names_each_part_on_a_floor_above_its_imports():
    floor = {part: i for i, row in enumerate(table()) for part in row}
    below = imports.folders()
    assert sorted(part for row in table() for part in row) == sorted(below)
    upward = {
        part: sorted(x for x in below[part] if floor[x] >= floor[part])
        for part in below
    }
    assert not {part: names for part, names in upward.items() if names}


def test_imports_between_files_and_folders_have_no_circle():
    assert len(imports.files()) == len(FILES) > 100
    assert not imports.circle(imports.files())
    assert not imports.circle(imports.folders())


def test_circle_of_circular_imports_returns_modules():
    assert imports.circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_imports_are_relative_so_that_a_copy_uses_its_own_code():
    absolute = re.compile(r"^ *(from|import) optclip\b", re.MULTILINE)
    assert not [p.name for p in FILES if absolute.search(p.read_text())]


def test_folders_are_private_and_have_tests():
    folders = [p for p in imports.ROOT.iterdir() if [*p.glob("*.py")]]
    assert len(folders) > 10
    assert not [p.name for p in folders if not p.name.startswith("_")]
    tested = {p.name for p in (CHECKOUT / "tests").iterdir()}
    assert not {p.name.strip("_") for p in folders} - tested


@pytest.mark.parametrize("name", FACES)
def test_public_module_holds_only_imports_and_names(name):
    docstring, *body = ast.parse(FACES[name].read_text()).body
    assert ast.get_docstring(ast.Module([docstring], []))
    *imported, names = body
    assert {type(node) for node in imported} == {ast.ImportFrom}
    assert ast.unparse(names.targets[0]) == "__all__"


def test_each_public_module_is_a_file():
    public = {
        name
        for name in optclip.__all__
        if getattr(getattr(optclip, name), "__name__", "") == f"optclip.{name}"
    }
    assert public == FACES.keys() > {"functional", "recipes", "typing"}


def is_behind_an_interface(name, path):
    """Return whether a file imports from a file of another folder."""
    _, folder, *rest = name.split(".")
    is_file = any(part.startswith("_") for part in rest)
    return is_file and folder not in ("_arrays", imports.folder_of(path))


def test_folders_import_what_their_neighbors_export():
    below = [p for p in FILES if p.parent != imports.ROOT]
    found = [
        (path.name, name)
        for path in below
        for name in imports.names(path)
        if name.startswith("optclip.") and is_behind_an_interface(name, path)
    ]
    assert not found


def test_optax_is_imported_above_the_clip_only():
    floor = {part: i for i, row in enumerate(table()) for part in row}
    core = {part for part in floor if floor[part] <= floor["_clip"]}
    names = {n for p in FILES if imports.folder_of(p) in core for n in imports.names(p)}
    assert {name.split(".")[0] for name in names} >= {"jax", "optclip"}
    assert not [name for name in names if name.split(".")[0] == "optax"]
