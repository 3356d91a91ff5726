"""Compare the blocks and versions of the page with the tests."""

import importlib.metadata
import re
import sys
from pathlib import Path

from packaging.version import Version

from tests.integration.stacks import page


def test_every_block_of_page_is_run():
    sources = "\n".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    titles = list(page.blocks())
    assert len(titles) == 26
    named = [title for title in titles if f'"{title}"' in sources]
    assert named == titles


def test_installed_versions_are_not_older_than_on_page():
    versions = re.findall(r"([\w-]+)==([\d.]+)", page.TEXT)
    assert len(versions) == 17
    for name, oldest in versions:
        # Aim's storage has no wheel for Python 3.13.
        if name != "aim" or sys.version_info < (3, 13):
            assert Version(importlib.metadata.version(name)) >= Version(oldest), name
