"""Read how the files and folders of the package import each other."""

import ast
import functools
import pathlib
from collections.abc import Iterator
from importlib import util

import optclip

ROOT = pathlib.Path(optclip.__file__).parent
# The file of a folder with the names that other folders use; in the root, all names.
INTERFACE = "__init__"


def folder_of(path: pathlib.Path) -> str:
    """Return the folder of a file below the root, or the name of a file in the root."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@functools.cache
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


def module_of(path: pathlib.Path) -> str:
    """Return the full name of the module in a file of the package."""
    parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == INTERFACE else parts)


def files() -> dict[str, set[str]]:
    """Return each module of the package with the modules that it imports."""
    paths = {module_of(path): path for path in ROOT.rglob("*.py")}
    return {
        module: {_module(name, paths) for name in names(path) if _is_ours(name)}
        - {module}
        for module, path in paths.items()
    }


def _module(name: str, modules: dict[str, pathlib.Path]) -> str:
    """Return the module of an imported name: itself, or the module that defines it."""
    return name if name in modules else name.rpartition(".")[0]


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == ROOT.name


def folders() -> dict[str, set[str]]:
    """Return each folder, or file in the root, with those that it imports."""
    below: dict[str, set[str]] = {}
    for module, imported in files().items():
        here = below.setdefault(_folder(module), set())
        here |= {_folder(each) for each in imported} - {_folder(module)}
    return below


def _folder(module: str) -> str:
    return [*module.split("."), INTERFACE][1]


def circle(below: dict[str, set[str]]) -> list[str]:
    """Return modules or folders that import each other in a circle, or nothing."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = [search(each, [*path, name]) for each in sorted(below[name])]
        done.add(name)
        return next(filter(None, found), [])

    return next(filter(None, (search(name, []) for name in below)), [])
