"""Find the imports between the folders of the package."""

import ast
import functools
import pathlib
from collections.abc import Iterator
from importlib import util

import optclip

ROOT = pathlib.Path(optclip.__file__).parent
# The file with the public names of a folder. The root's imports all folders.
FACE = "__init__"


def folder_of(path: pathlib.Path) -> str:
    """Return the folder of a file below the root, or the name of a file in the root."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def names(path: pathlib.Path) -> set[str]:
    """Return the full names that a file of the package imports."""
    package = ".".join([ROOT.name, *path.relative_to(ROOT).parent.parts])
    return names_in(path.read_text(), package)


def names_in(source: str, package: str) -> set[str]:
    """Return the names that a source imports; relative imports start at `package`."""
    return {n for node in ast.walk(ast.parse(source)) for n in _names(node, package)}


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            if not alias.asname:
                # `import a.b` binds `a`, through which its other names are accessible.
                yield alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        module = util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func).split(".")[-1]
        if called in ("import_module", "__import__"):
            yield _called_for(node)


def _called_for(call: ast.Call) -> str:
    name = getattr(call.args[0], "value", None) if call.args else None
    if not isinstance(name, str) or name.startswith("."):
        raise ValueError(
            f"the imported name is not a literal: {ast.unparse(call)}; pass a full name"
        )
    return name


def folders_in(imported: set[str], folders: set[str]) -> set[str]:
    """Return the imported folders; names defined by the root itself map to `FACE`."""
    paths = [name.split(".")[1:] for name in imported if _is_ours(name)]
    return {path[0] if path and path[0] in folders else FACE for path in paths}


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == ROOT.name


def folders() -> dict[str, set[str]]:
    """Return each folder of the package with the folders that it imports.

    Excludes `__init__.py` files, since public names of a folder may come from above.
    """
    imported: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.stem != FACE:
            imported.setdefault(folder_of(path), set()).update(names(path))
    return {
        folder: folders_in(names, set(imported)) - {folder}
        for folder, names in imported.items()
    }


def longest_chain() -> list[str]:
    """Return the longest chain of imports between folders, from the top down."""
    below = folders()

    @functools.cache
    def under(folder: str) -> tuple[str, ...]:
        return (folder, *max(map(under, below[folder]), key=len, default=()))

    return list(max(map(under, below), key=len))
