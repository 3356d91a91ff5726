"""One version, wherever it is written; and the oldest Python and jax that are promised."""

import re
import tomllib
from pathlib import Path

import optclip

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version():
    version = PROJECT["version"]
    assert optclip.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    headings = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[0] == version


def test_one_oldest_python():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"CPython {oldest}+" in (ROOT / "README.md").read_text()
    major, minor = oldest.split(".")
    assert f"OLDEST = ({major}, {minor})" in (ROOT / "run.py").read_text()
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert named[0] == oldest


def test_run_time_needs_three_packages():
    names = {re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"]}
    assert names == {"jax", "jaxlib", "optax"}


def test_the_workflow_runs_the_oldest_that_is_promised():
    flow = (ROOT / ".github" / "workflows" / "jax.yml").read_text()
    (oldest,) = re.findall(r"name: oldest\n.*\n +packages: (.+)", flow)
    bounds = dict(each.split(">=") for each in PROJECT["dependencies"])
    pinned = dict(each.split("==") for each in oldest.split())
    assert set(pinned) == set(bounds)
    for name, version in pinned.items():
        assert version.removesuffix(".0") == bounds[name].removesuffix(".0")
