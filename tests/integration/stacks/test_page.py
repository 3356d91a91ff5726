"""Compare the blocks, packages and versions of the page with the tests."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.stacks import page

ROOT = Path(__file__).parents[3]
VERSIONS = dict(page.rows("package"))
# Packages that only the tests need.
TOOLS = {
    "chex", "ipykernel", "matplotlib", "nbclient", "nbformat", "pytest",
    "scikit-learn",
}  # fmt: skip


def test_every_block_of_page_is_run():
    sources = "\n".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    titles = list(page.blocks())
    assert len(titles) == 24
    named = [title for title in titles if f'"{title}"' in sources]
    assert named == titles


def test_page_lists_versions_of_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    group = project["dependency-groups"]["stacks"]
    names = {re.split(r"[<>=;\[ ]", each)[0] for each in group}
    required = project["project"]["dependencies"]
    names |= {re.split(r"[<>=]", each)[0] for each in required}
    assert set(VERSIONS) == names - TOOLS - {"jaxlib"}


@pytest.mark.parametrize("name", VERSIONS)
def test_installed_version_is_not_older_than_on_page(name):
    if name == "aim" and sys.version_info >= (3, 13):
        pytest.skip("Aim's storage has no wheel for Python 3.13")
    installed = importlib.metadata.version(name)
    assert _numbers(installed) >= _numbers(VERSIONS[name])


def _numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
