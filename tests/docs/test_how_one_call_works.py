"""Tests of the functions that docs/how_one_call_works.md names."""

import pathlib
import re
import sys

import jax
import numpy as np

import optclip

PACKAGE = pathlib.Path(optclip.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "how_one_call_works.md").read_text()


def traced_functions():
    """Return the file and name of each function that one traced call runs through."""
    tx = optclip.clip_by_global_norm(1.0)
    state = tx.init({"w": np.ones(2), "b": np.ones(2)})
    # No other test has these shapes, whose traces JAX would find and not repeat.
    updates = {"w": np.ones((1, 7, 1, 83)), "b": np.ones((1, 1, 1, 89))}
    functions = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}"):
            path = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
            functions.append((path, code.co_qualname.rpartition("<locals>.")[2]))

    step = jax.jit(tx.update)
    sys.setprofile(profile)
    try:
        step.trace(updates, state)
    finally:
        sys.setprofile(None)
    return functions


def test_table_names_the_files_and_functions_of_a_call_in_order():
    rows = re.findall(r"^\|.*\| `(\w+/\w+\.py)` \| (.*) \|$", PAGE, re.MULTILINE)
    named = [
        (path, name) for path, cell in rows for name in re.findall("`(.*?)`", cell)
    ]
    called = traced_functions()
    files = {path for path, _ in called if not path.startswith("_arrays/")}
    assert files == {path for path, _ in named}
    rest = iter(called)
    assert not [each for each in named if each not in rest]


def test_numpy_equivalent_has_at_most_thirty_lines():
    lines = PAGE.split("```python\n")[1].split("tx = ")[0].splitlines()
    assert 0 < len([line for line in lines if line]) <= 30


def test_kernels_of_the_compiled_step_are_those_of_the_benchmarks():
    table = (PACKAGE.parent / "docs" / "benchmarks.md").read_text()
    row = r"^\| global norm \| (\d+) [^|]*\| (\d+) \|"
    ((ours, optax),) = re.findall(row, table, re.MULTILINE)
    assert f"{ours} with this call and {optax} with the one of optax" in PAGE
