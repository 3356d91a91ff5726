"""The code of the pages runs, prints what it says, and the pages name what there is."""

import pathlib
import re

import pytest

from optclip import recipes

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = (
    "add_a_method.md",
    "at_scale.md",
    "design.md",
    "index.md",
    "logging.md",
    "methods.md",
    "sharp_edges.md",
)
BLOCKS = [
    pytest.param(code, id=f"{page}-{i}")
    for page in PAGES
    for i, code in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("code", BLOCKS)
def test_blocks_print_what_they_say(code, capsys):
    exec(code, {})
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_there_are_blocks():
    assert len(BLOCKS) == 19


def test_every_recipe_has_a_row():
    page = (DOCS / "methods.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)
    assert sorted(rows) == sorted(recipes.__all__)


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    text = (DOCS / page).read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert not [name for name in linked if not (DOCS / name).exists()]
    named = re.findall(r"`((?:tests|optclip|benchmarks|examples)/[\w/]+\.py)`", text)
    assert not [name for name in named if not (DOCS.parent / name).exists()]
