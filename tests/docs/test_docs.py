"""Tests of the README and the pages: code, figures, plots, tables and links."""

import pathlib
import re

import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes
from tests.support import helpers, oracles
from tools import pictures

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text()
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
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]\d+)?")


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_page_code_prints_its_comments(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(code, {})
        comments = re.findall(r"^# (.*)$", code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == comments, code


@pytest.mark.parametrize(
    "words", ["DDP", "Gradient accumulation", "loss scale", "Mixed precision"]
)
def test_common_search_words_have_a_section_with_code(words):
    pages = "\n".join((DOCS / page).read_text() for page in PAGES)
    sections = re.split(r"^## ", pages, flags=re.MULTILINE)
    (section,) = (text for text in sections if words in text.split("\n")[0])
    assert "```python" in section


def test_plots_of_logging_page_equal_those_of_notebook():
    """`python -m tools.pictures` extracts them."""
    page = (DOCS / "logging.md").read_text()
    shown = re.findall(r"\(images/(which_\w+\.png)\)", page)
    kept = pictures.named()
    assert sorted(shown) == sorted(kept)
    for name, picture in kept.items():
        assert (DOCS / "images" / name).read_bytes() == picture
        assert len(picture) < 60_000


def test_figures_of_choosing_page_occur_where_measured():
    """Losses of three seeds are in a notebook's output, others on two pages."""
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


def test_methods_page_has_a_row_for_every_recipe():
    page = (DOCS / "methods.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)
    assert sorted(rows) == sorted(recipes.__all__)


@pytest.mark.parametrize(
    "page", ["../README.md", *sorted(p.name for p in DOCS.glob("*.md"))]
)
def test_page_links_lead_to_files(page):
    text = (DOCS / page).read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    folder = (DOCS / page).parent
    assert not [name for name in linked if not (folder / name).exists()]
    places = r"`(tests/[\w/]+(?:\.py)?|(?:optclip|benchmarks|examples)/[\w/]+\.py)`"
    named = re.findall(places, text)
    assert not [name for name in named if not (DOCS.parent / name).exists()]


def test_readme_is_short_and_lists_every_clip():
    assert len(README.split()) <= 900
    clips = [name for name in optclip.__all__ if name.startswith("clip_by_")]
    assert not [name for name in clips if f"`{name}(" not in README]


def test_readme_norms_of_rounded_leaves_are_measured():
    """Those of its other rows are in docs/comparison.md."""
    leaves = list(np.random.default_rng(0).uniform(size=(200, 64)).astype(jnp.bfloat16))
    for library, norm in ((optax, 1.04), (optclip, 1.0)):
        tx = library.clip_by_global_norm(1.0)
        clipped, _ = helpers.quick_jit(tx.update)(leaves, tx.init(leaves))
        found = oracles.tree_norm(helpers.as_float64(clipped))
        np.testing.assert_allclose(found, norm, atol=5e-3)
