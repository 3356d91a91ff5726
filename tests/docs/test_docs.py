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

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text()
PAGES = [
    path.name
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in path.read_text() and path.name != "integrations.md"
]


def test_figures_of_guides_occur_where_measured():
    """Means are computed from notebooks; medians are in spike_benchmark.md."""
    printed = ""
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                printed += " ".join(output.get("text", "").split()) + "\n"
    seeds = re.findall(r"(?=\b(\d\.\d\d) (\d\.\d\d) (\d\.\d\d))", printed)
    arrays = [np.array(each, float) for each in seeds]
    means = {f"{np.mean(x):.2f} ± {np.std(x):.2f}" for x in arrays}
    guides = "".join((DOCS / page).read_text() for page in PAGES)
    stated = re.findall(r"(?<!\d)\d\.\d\d ± \d\.\d\d(?!\d)", guides)
    assert len(stated) >= 20
    assert not [each for each in stated if each not in means and each not in printed]
    medians = re.findall(r"\d\.\d{3}", (DOCS / "loss_spikes.md").read_text())
    assert medians
    example = DOCS.parent / "examples" / "train_gpt.py"
    measured = (DOCS / "spike_benchmark.md").read_text() + example.read_text()
    assert not [each for each in medians if each not in measured]


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
    assert len(README.split()) <= 1000
    clips = [name for name in optclip.__all__ if name.startswith("clip_by_")]
    assert not [name for name in clips if f"{name}(" not in README]


def test_readme_norms_of_rounded_leaves_are_measured():
    """Those of its other rows are in docs/migrating.md."""
    draws = np.random.default_rng(0)
    kinds = draws.uniform(size=(200, 256)), draws.normal(size=(200, 1000))
    for leaves, of_optax in zip(kinds, (1.06, 0.99), strict=True):
        for library, norm in ((optax, of_optax), (optclip, 1.0)):
            tx = library.clip_by_global_norm(1.0)
            tree = list(leaves.astype(jnp.bfloat16))
            # Not compiled: XLA would take seconds for the program of 200 leaves.
            clipped, _ = tx.update(tree, tx.init(tree))
            found = oracles.tree_norm(helpers.as_float64(clipped))
            np.testing.assert_allclose(found, norm, atol=5e-3)
