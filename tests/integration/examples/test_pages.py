"""Run the code blocks of the README and of each page, as the page prints them."""

import pathlib
import re

import pytest

from tests.integration.stacks.page import OTHER_LIBRARIES

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
PAGES = [
    path.name
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in path.read_text() and path.name != "integrations.md"
]


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_page_code_prints_its_comments(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        if OTHER_LIBRARIES.search(code):
            continue
        exec(code, {})
        comments = re.findall(r"^# (.*)$", code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == comments, code
