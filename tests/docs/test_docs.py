"""The code of the pages runs, prints what it says, and the pages name what there is."""

import pathlib
import re

import nbformat
import pytest

from optclip import recipes
from tools import pictures

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "at_scale.md",
    "index.md",
    "logging.md",
    "methods.md",
    "nonfinite.md",
    "numerics.md",
    "sharp_edges.md",
    "which_clip.md",
)
BLOCKS = [
    pytest.param(code, id=f"{page}-{i}")
    for page in PAGES
    for i, code in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )
]
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]\d+)?")


@pytest.mark.parametrize("code", BLOCKS)
def test_blocks_print_what_they_say(code, capsys):
    exec(code, {})
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_the_pages_are_few():
    assert len(list(DOCS.glob("*.md"))) <= 12


def test_there_are_blocks():
    assert len(BLOCKS) == 44


@pytest.mark.parametrize(
    "words", ["DDP", "Gradient accumulation", "loss scale", "Mixed precision"]
)
def test_what_people_search_for_is_a_section_with_code(words):
    pages = "\n".join((DOCS / page).read_text() for page in PAGES)
    sections = re.split(r"^## ", pages, flags=re.MULTILINE)
    found = [text for text in sections if words in text.split("\n")[0]]
    assert len(found) == 1
    assert "```python" in found[0]


def test_the_pictures_are_the_notebooks():
    """`python -m tools.pictures` takes them out of it."""
    page = (DOCS / "logging.md").read_text()
    shown = re.findall(r"\(images/(which_\w+\.png)\)", page)
    kept = pictures.named()
    assert sorted(shown) == sorted(kept)
    for name, picture in kept.items():
        assert (DOCS / "images" / name).read_bytes() == picture
        assert len(picture) < 60_000


def test_the_figures_were_measured():
    """Losses of three seeds are in a notebook's output, others on the pages named."""
    page = " ".join((DOCS / "which_clip.md").read_text().split())
    printed = ""
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                printed += " ".join(output.get("text", "").split()) + "\n"
    pages = "".join(
        (DOCS / name).read_text() for name in ("spikes.md", "comparison.md")
    )
    seeds = re.findall(r"\d\.\d\d \d\.\d\d \d\.\d\d", page)
    assert len(seeds) >= 20
    assert not [each for each in seeds if each not in printed]
    code_and_pictures = r"```.*?```|`[^`]*`|!\[[^]]*\]"
    said = NUMBER.findall(re.sub(code_and_pictures, "", page))
    assert len(said) >= 120
    # A difference of others, and two that show how a guarantee breaks.
    rest = {"0.13", "1.001", "3.4"}
    assert set(said) - set(NUMBER.findall(printed + pages)) == rest


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
