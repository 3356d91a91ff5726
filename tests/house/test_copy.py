"""A copy of the package under another name works by its own code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

CHECKOUT = pathlib.Path(__file__).parents[2]
TESTS = ["__init__.py", "conftest.py", "support", "contracts"]
# Imports of the package in the tests.
IMPORTED = re.compile(r"^(\s*)(?:import optclip$|from optclip\b)", re.M)


def renamed(found):
    """Return an import of the package as an import of the copy."""
    indent, is_from = found[1], "from" in found[0]
    return f"{indent}from lab.third_party{'.optclip' if is_from else ' import optclip'}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a folder with a copy of the package, and tests that import the copy."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "lab" / "third_party" / "optclip"
    shutil.copytree(CHECKOUT / "optclip", package)
    (folder / "tests" / "integration").mkdir(parents=True)
    for name in TESTS:
        source, target = CHECKOUT / "tests" / name, folder / "tests" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    for file in folder.glob("tests/**/*.py"):
        file.write_text(IMPORTED.sub(renamed, file.read_text()))
    return folder


def python(folder, *command):
    """Run Python in a folder; return its output."""
    # Workers of pytest-xdist would have a name of their own here.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (folder, CHECKOUT)))
    run = [sys.executable, *command]
    done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


CLIP_AND_PICKLE = """
import pickle
import jax.numpy as jnp
from lab.third_party import optclip as copy
from lab.third_party.optclip import recipes, thresholds

updates = jnp.array([3.0, 4.0])
clipped, norm = copy.functional.clip_by_global_norm(updates, 1.0)
assert jnp.allclose(clipped, updates / 5) and norm == 5

names = {*thresholds.__all__} - {"Bounds", "Rule", "Seen", "of", "of_gradients", "scaled"}
rules = [getattr(thresholds, name)() for name in names]
for rule in [*rules, thresholds.of('max', thresholds.ema()), copy.norms.Norm(3.0)]:
    assert pickle.loads(pickle.dumps(rule)) == rule
assert copy.norms.Norm.__module__ == "lab.third_party.optclip.norms"
state = pickle.dumps(copy.clip_by_norm(thresholds.ema()).init(updates))
assert b"lab.third_party.optclip.typing" in state and b"optclip._typing" not in state

words = {thresholds.ema: "Call the function", recipes.zclip: "is not a threshold"}
for factory, expected in words.items():
    try:
        copy.clip_by_norm(factory)
    except TypeError as error:
        assert expected in str(error)
    else:
        raise AssertionError(f"{factory} passed as a schedule")
try:
    copy.zclip
except AttributeError as error:
    assert "lab.third_party.optclip.recipes.zclip" in str(error)
"""
BOTH = """
import optclip
assert optclip.functional.clip_by_norm is not copy.functional.clip_by_norm
assert optclip.typing.ClipState is not copy.typing.ClipState
assert optclip.functional.clip_by_norm(updates, 1.0).tolist() == clipped.tolist()
"""


def test_copy_under_another_name_clips_by_its_own_code(copy):
    """The original is installed, but the copy does not import it."""
    report = "\nprint(*(m for m in sys.modules if m.partition('.')[0] == 'optclip'))"
    code = f"import sys\n{CLIP_AND_PICKLE}{report}{BOTH}"
    assert python(copy, "-c", code).split() == []


def test_copy_under_another_name_rejects_bad_input_without_original(copy):
    main = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    # Importing the original raises.
    code = f"import sys\nsys.modules['optclip'] = None\n{main}"
    options = ["-q", "-p", "no:cacheprovider", "-c", str(CHECKOUT / "pyproject.toml")]
    # The messages of each function, without all kinds of bad values.
    where = [
        "--rootdir",
        str(copy),
        "tests/contracts/test_bad_input.py",
        "-k",
        "message",
    ]
    passed = re.search(r"(\d+) passed", python(copy, "-c", code, *options, *where))
    assert int(passed[1]) > 100
