"""Which folders of the package each of them imports."""

import ast
import functools
import pathlib
from collections.abc import Iterator
from importlib import util

import optclip

ROOT = pathlib.Path(optclip.__file__).parent
# The file with the public names of a folder; that of the root imports all folders.
FACE = "__init__"


def folder_of(path: pathlib.Path) -> str:
    """The folder below the package's root that a file is in, or its own name there."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def names(path: pathlib.Path) -> set[str]:
    """The full names that a file of the package imports, in whatever form."""
    package = ".".join([ROOT.name, *path.relative_to(ROOT).parent.parts])
    return names_in(path.read_text(), package)


def names_in(source: str, package: str) -> set[str]:
    """The same of a source whose relative imports start at `package`."""
    return {n for node in ast.walk(ast.parse(source)) for n in _names(node, package)}


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            if not alias.asname:
                # `import a.b` binds `a`, and with it all else that is in it.
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
        raise ValueError(f"What is imported cannot be read off: {ast.unparse(call)}")
    return name


def folders_in(imported: set[str], known: set[str]) -> set[str]:
    """Those of the package that are imported; what its face defines is the face's."""
    paths = [name.split(".")[1:] for name in imported if _is_ours(name)]
    return {path[0] if path and path[0] in known else FACE for path in paths}


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == ROOT.name


def folders() -> dict[str, set[str]]:
    """Each folder of the package and those that it imports.

    An `__init__.py` is left out: the public names of a folder may come from above.
    """
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.stem != FACE:
            found.setdefault(folder_of(path), set()).update(names(path))
    known = found.keys()
    return {here: folders_in(all_, set(known)) - {here} for here, all_ in found.items()}


def longest_chain() -> list[str]:
    """The longest chain of imports between folders, from the top down."""
    below = folders()

    @functools.cache
    def under(folder: str) -> tuple[str, ...]:
        return (folder, *max(map(under, below[folder]), key=len, default=()))

    return list(max(map(under, below), key=len))
