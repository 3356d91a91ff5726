"""Limit the size of the package, and the files that one call runs through.

A change that needs more raises a number here, in a commit of its own that states why.
"""

import ast
import importlib
import io
import os
import pathlib
import sys
import tokenize

import jax
import jax.numpy as jnp

import optclip
from optclip import thresholds

PACKAGE = pathlib.Path(optclip.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
LINES, FILES, NAMES, TESTS_OVER_PACKAGE = 12_466, 160, 131, 1.32
# The core: clipping without wrappers, published methods and tools.
CORE = [
    "_arrays",
    "_norms",
    "_scopes",
    "_responses",
    "_clip",
    "_transforms",
    "_typing",
    "_functional",
    "_thresholds",
]
CORE_LINES, CORE_FILES = 5_145, 44
# The files and the calls between files of one traced update, without `_arrays`.
TREE = {"a": jnp.ones((4, 5)), "b": jnp.ones(3)}
WALKS = {
    "clip_by_global_norm(1.0)": (optclip.clip_by_global_norm(1.0), 10, 23),
    "clip_by_norm(ema())": (optclip.clip_by_norm(thresholds.ema()), 15, 50),
    "clip_by_singular_value(1.0)": (optclip.clip_by_singular_value(1.0), 15, 60),
}


def logical_lines(folder):
    """Return the number of statements of a folder's files, docstrings not counted."""
    return sum(_statements(path.read_text()) for path in folder.rglob("*.py"))


def _statements(source):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    documented = [
        node.body[0].end_lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and ast.get_docstring(node) is not None
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    ends = [token.start[0] for token in tokens if token.type == tokenize.NEWLINE]
    return len(ends) - len({*documented} & {*ends})


def public_names():
    """Return the exported names of the package and of its public modules."""
    names = [f"optclip.{name}" for name in optclip.__all__]
    for path in PACKAGE.glob("*.py"):
        if path.stem in optclip.__all__:
            module = importlib.import_module(f"optclip.{path.stem}")
            names += [f"{module.__name__}.{name}" for name in module.__all__]
    return names


def test_statements_of_source_exclude_docstrings_and_comments():
    source = (
        '"""Module."""\nx = (\n  1,\n)  # One.\n\ndef f():\n  """Doc."""\n  return x\n'
    )
    assert _statements(source) == 3


def test_package_stays_within_its_lines_files_and_names():
    lines, files = logical_lines(PACKAGE), [*PACKAGE.rglob("*.py")]
    assert 1_000 < lines <= LINES
    assert 10 < len(files) <= FILES
    assert 10 < len(public_names()) <= NAMES
    core = [PACKAGE / name for name in CORE]
    assert 1_000 < sum(map(logical_lines, core)) <= CORE_LINES
    code = [x for part in core for x in part.rglob("*.py") if x.name != "__init__.py"]
    assert 10 < len(code) <= CORE_FILES
    assert logical_lines(TESTS) <= TESTS_OVER_PACKAGE * lines


def test_updates_run_through_few_files():
    states = {name: tx.init(TREE) for name, (tx, *_) in WALKS.items()}
    for name, (tx, most_files, most_crossings) in WALKS.items():
        files, crossings = walk(tx, states[name])
        assert 1 < len(files) <= most_files, (name, sorted(files))
        assert 1 < crossings <= most_crossings, name


def walk(tx, state):
    """Return the files that tracing one update runs, and the calls between them."""
    files, stack, crossings = set(), [], 0
    package = f"{PACKAGE}{os.sep}"

    def profile(frame, event, _):
        nonlocal crossings
        code = frame.f_code
        if not code.co_filename.startswith(package) or code.co_name.startswith("<"):
            return
        if event == "call":
            name = code.co_filename.removeprefix(package)
            if not name.startswith("_arrays"):
                callers = (x for x in reversed(stack) if not x.startswith("_arrays"))
                crossings += next(callers, name) != name
                files.add(name)
            stack.append(name)
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        # JAX would not run functions again that it has traced for these types.
        with jax.disable_jit():
            jax.make_jaxpr(tx.update)(TREE, state, TREE)
    finally:
        sys.setprofile(before)
    return files, crossings
