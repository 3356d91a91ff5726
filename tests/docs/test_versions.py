"""Tests of values that are written in several places: versions."""

import re
import tomllib
from pathlib import Path

import optclip

ROOT = Path(__file__).parents[2]
FLOWS = ROOT / ".github" / "workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert optclip.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (ROOT / "CITATION.bib").read_text()
    assert (
        (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].startswith(f"{version} (")
    )


def test_workflow_pins_oldest_dependencies():
    flow = (FLOWS / "jax.yml").read_text()
    (oldest,) = re.findall(r"name: oldest\n.*\n +packages: (.+)", flow)
    bounds = dict(each.split(">=") for each in PROJECT["dependencies"])
    pinned = dict(each.split("==") for each in oldest.split())
    assert set(pinned) == set(bounds)
    for name, version in pinned.items():
        assert version.removesuffix(".0") == bounds[name].removesuffix(".0")
