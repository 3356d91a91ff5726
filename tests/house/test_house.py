"""Check the folders: imports go downward, to the interfaces of neighbors."""

import pathlib
import re

from tools import imports

CHECKOUT = pathlib.Path(__file__).parents[2]


def floors():
    """Return the rows of CONTRIBUTING.md's table, from the bottom up."""
    page = (CHECKOUT / "CONTRIBUTING.md").read_text()
    table = page.split("| folder of `optclip` |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    return rows[::-1]


FLOORS = floors()
FLOOR = {folder: i for i, floor in enumerate(FLOORS) for folder in floor}


def files(*folders):
    """Return the package's files in these folders."""
    return [p for p in imports.ROOT.rglob("*.py") if imports.folder_of(p) in folders]


def test_each_folder_is_in_the_table_once_and_has_tests():
    named = [folder for floor in FLOORS for folder in floor]
    assert sorted(named) == sorted(imports.folders())
    folders = [name for name in named if (imports.ROOT / name).is_dir()]
    assert not [f for f in folders if not (CHECKOUT / "tests" / f.strip("_")).is_dir()]


def test_imports_go_down_through_every_floor():
    below = imports.folders()
    assert len(files(*FLOOR)) > 50
    upward = {
        folder: {x for x in below[folder] if FLOOR.get(x, 99) >= FLOOR[folder]}
        for folder in FLOOR
    }
    assert not {folder: found for folder, found in upward.items() if found}
    assert len(imports.longest_chain()) == len(FLOORS)


def is_behind_another_face(name, path):
    """Return whether a file imports from a private module of another folder."""
    _, folder, *rest = name.split(".")
    is_private = any(part.startswith("_") and part != "_interface" for part in rest)
    is_shared = folder in ("_arrays", imports.folder_of(path))
    return is_private and not is_shared


def test_folders_use_the_interface_of_their_neighbors():
    found = [
        (path.name, name)
        for path in files(*FLOOR)
        if path.stem != imports.FACE
        for name in imports.names(path)
        if name.startswith("optclip.") and is_behind_another_face(name, path)
    ]
    assert not found


def test_optax_is_imported_above_the_clip_only():
    below = [name for name in FLOOR if FLOOR[name] <= FLOOR["_clip"]]
    names = {name for path in files(*below) for name in imports.names(path)}
    assert {name.split(".")[0] for name in names} >= {"jax", "optclip"}
    assert not [name for name in names if name.split(".")[0] == "optax"]
