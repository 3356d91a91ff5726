"""The folders of the package: imports go downward only, and who builds what."""

import ast
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
import typing

import pytest

import optclip
from tools import imports, mutation

CHECKOUT = pathlib.Path(__file__).parents[2]
BUILDERS = {
    "GradientTransformation", "GradientTransformationExtraArgs", "stateless",
    "stateless_with_tree_map",
}  # fmt: skip


def floors():
    """The rows of CONTRIBUTING.md's table, from the bottom up."""
    page = (CHECKOUT / "CONTRIBUTING.md").read_text()
    table = page.split("| folder of `optclip` |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    return rows[::-1]


FLOOR = {folder: i for i, floor in enumerate(floors()) for folder in floor}


def wrong_way(folder, imported):
    """Those imports of a folder that do not go down."""
    found = imports.folders_in(imported, FLOOR.keys()) - {folder}
    return {other for other in found if FLOOR.get(other, 99) >= FLOOR[folder]}


def files(*folders):
    """The package's files in these folders."""
    return [p for p in imports.ROOT.rglob("*.py") if imports.folder_of(p) in folders]


def test_the_table_of_contributors_names_each_folder_and_file_once():
    named = [folder for floor in floors() for folder in floor]
    assert sorted(named) == sorted(imports.folders())


def test_tests_have_a_folder_for_each_of_the_package():
    folders = [name for name in FLOOR if (imports.ROOT / name).is_dir()]
    missing = [f for f in folders if not (CHECKOUT / "tests" / f.strip("_")).is_dir()]
    assert not missing


def test_imports_go_down():
    wrong = {
        p: wrong_way(imports.folder_of(p), imports.names(p)) for p in files(*FLOOR)
    }
    assert len(wrong) > 50
    assert not {path: found for path, found in wrong.items() if found}


def test_the_longest_chain_goes_through_every_floor_once():
    assert len(imports.longest_chain()) == len(floors())


def imports_optax(found):
    return any(name.split(".")[0] == "optax" for name in found)


def test_the_one_clip_and_what_is_below_never_import_optax():
    below = [name for name in FLOOR if FLOOR[name] <= FLOOR["_clip"]]
    assert not [p for p in files(*below) if imports_optax(imports.names(p))]
    forms = (
        "import optax", "import optax.tree as t", "from optax import chain",
        "from optax.tree import get", "import_module('optax')",
    )  # fmt: skip
    assert all(imports_optax(imports.names_in(form, "optclip")) for form in forms)


def builders_in(node, known=frozenset()):
    """What builds transformations where code runs: not annotations, nor isinstance."""
    if isinstance(node, ast.Module):
        found = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom)]
        aliases = [alias for n in found for alias in n.names]
        known = {a.asname for a in aliases if a.name in BUILDERS}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return
    name = getattr(node, "attr", getattr(node, "id", None))
    if name in BUILDERS | known:
        yield name
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from builders_in(each, known)


def test_three_folders_alone_build_transformations():
    building = {
        imports.folder_of(path)
        for path in files(*FLOOR)
        if list(builders_in(ast.parse(path.read_text())))
    }
    assert building == {"transforms", "wrappers", "per_example"}


def test_programs_that_are_no_tests_are_not_among_them():
    """One is: a test starts it, several times at once."""
    paths = (CHECKOUT / "tests").rglob("*.py")
    programs = {p.name for p in paths if "\nif __name__ ==" in p.read_text()}
    assert programs == {"training_process.py"}


def test_each_module_is_given_tests_that_exist_to_notice_faults_in_it():
    modules = {str(p.relative_to(imports.ROOT).with_suffix("")) for p in files(*FLOOR)}
    with_code = {m for m in modules if "/_" in m and not m.endswith("/__init__")}
    # Names for kinds of argument and state: nothing is computed there.
    names = {"_arrays/_types", "typing/_options", "typing/_states"}
    assert set(mutation.TESTS) == with_code - names
    for name in {name for tests in mutation.TESTS.values() for name in tests.split()}:
        path, _, test = mutation._file(name).partition("::")
        function = test.split("[")[0] or r"test_\w+"
        found = (CHECKOUT / path).read_text()
        assert re.search(rf"^def {function}\(", found, re.MULTILINE), name


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
    shutil.copytree(imports.ROOT, tmp_path / "optclip")
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
