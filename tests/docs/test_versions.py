"""What is written in several places: versions, oldest, newest, and the parts of CI."""

import re
import tomllib
from pathlib import Path

import optclip

ROOT = Path(__file__).parents[2]
FLOWS = ROOT / ".github" / "workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [
    each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each
]


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
    assert PYTHONS[0] == oldest


def test_ci_has_the_oldest_python_and_the_newest():
    assert f'NEWEST = run.find("{PYTHONS[-1]}")' in (ROOT / "noxfile.py").read_text()
    found = re.findall(r"\b3\.\d+", (FLOWS / "ci.yml").read_text())
    assert set(found) == {PYTHONS[0], PYTHONS[-1]}


def test_ci_runs_every_session():
    """Those that plain `nox` runs, that is: the workflow, and .ci/run after the suite."""
    sessions = re.findall(
        r"^@nox\.session(?:\(python=NEWEST\))?\ndef (\w+)",
        (ROOT / "noxfile.py").read_text(),
        re.MULTILINE,
    )
    (jobs,) = re.findall(r"^ +name: \[(.+)\]", (FLOWS / "ci.yml").read_text(), re.M)
    assert sorted(jobs.split(", ")) == sorted(sessions)
    (parts,) = re.findall(r"^parts=\((.+)\)", (ROOT / ".ci/run").read_text(), re.M)
    assert sorted(parts.split()) == sorted(["suite", *sessions])


def test_run_time_needs_three_packages():
    names = {re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"]}
    assert names == {"jax", "jaxlib", "optax"}


def test_the_workflow_runs_the_oldest_that_is_promised():
    flow = (FLOWS / "jax.yml").read_text()
    (oldest,) = re.findall(r"name: oldest\n.*\n +packages: (.+)", flow)
    bounds = dict(each.split(">=") for each in PROJECT["dependencies"])
    pinned = dict(each.split("==") for each in oldest.split())
    assert set(pinned) == set(bounds)
    for name, version in pinned.items():
        assert version.removesuffix(".0") == bounds[name].removesuffix(".0")
