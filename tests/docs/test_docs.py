"""Tests of the README and the pages: code, figures, plots, tables and links."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest

import optclip
from docs.plots_and_tables import comparison
from docs.plots_and_tables import level_shift_table as table
from optclip import recipes
from tests.support import covering, helpers, oracles

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
ROOT_PAGES = ["README.md", "AGENTS.md"]
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


def anchors(path):
    """Return the anchors of a page, on GitHub and on the site."""
    text = re.sub("```.*?```", "", path.read_text(), flags=re.DOTALL).lower()
    return {
        re.sub(r"[^\w -]", "", heading).replace(" ", "-")
        for heading in re.findall("^#+ (.*)", text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page",
    [f"../{name}" for name in ROOT_PAGES] + sorted(p.name for p in DOCS.glob("*.md")),
)
def test_page_links_lead_to_files_and_anchors(page):
    text = (DOCS / page).read_text()
    for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (DOCS / page).parent / name if name else DOCS / page
        assert anchor in anchors(path) if anchor else path.exists(), path
    places = r"`(tests/[\w/]+(?:\.py)?|(?:optclip|benchmarks|examples)/[\w/]+\.py)`"
    assert not [x for x in re.findall(places, text) if not (DOCS.parent / x).exists()]


def test_code_lines_fit_the_column_of_the_site():
    """A window of 1,400 pixels cuts off longer lines of pages, and of cells."""
    texts = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    texts |= {name: (DOCS.parent / name).read_text() for name in ROOT_PAGES}
    lines = {
        name: "".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S))
        for name, text in texts.items()
    }
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        lines[path.name] = "\n".join(code)
    wide = [(name, x) for name in lines for x in lines[name].splitlines() if x[84:]]
    assert not wide


def test_readme_is_short_and_lists_every_clip():
    assert len(README.split()) <= 850
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


# The table of docs/migrating.md: inputs on which optax fails.

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def test_comparison_table_matches_run():
    """The column of optax is compared if the page names the installed version."""
    tables = [
        [line.split("|") for line in table.splitlines()]
        for table in (comparison.current_table(), comparison.new_table())
    ]
    same_optax = f" optax {optax.__version__} " in tables[0][0]
    for cells, expected in zip(*tables, strict=True):
        if not same_optax:
            del cells[2], expected[2]
        line, new = "|".join(cells), "|".join(expected)
        assert NUMBER.split(line) == NUMBER.split(new)
        # Another CPU may round the third digit differently.
        numbers = (np.float64(NUMBER.findall(text)) for text in (line, new))
        np.testing.assert_allclose(*numbers, rtol=2e-3)


# The table of docs/choosing_a_threshold.md: steps that rules need after a shift.

# Two rows without a window, which are fast; the others run with `--full`.
QUICK = ["`olmo_ratio()`", "`zclip(max_norm=None)`, `thresholds.zscore()`"]


def test_level_shift_table_matches_run():
    """If not, run `python -m docs.plots_and_tables.level_shift_table`."""
    page = table.PAGE.read_text()
    for name in table.ROWS if covering.full else QUICK:
        assert table.row(name) in page


# The functions that docs/how_one_call_works.md names.

PACKAGE = pathlib.Path(optclip.__file__).parent
ONE_CALL = (DOCS / "how_one_call_works.md").read_text()


def traced_functions():
    """Return the file and name of each function that one traced call runs through."""
    tx = optclip.clip_by_global_norm(1.0)
    state = tx.init({"w": np.ones(2), "b": np.ones(2)})
    updates = {"w": np.ones(2), "b": np.ones(2)}
    functions = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}"):
            path = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
            functions.append((path, code.co_qualname.rpartition("<locals>.")[2]))

    sys.setprofile(profile)
    try:
        # JAX would not run functions again that it has traced for scalars of a type.
        with jax.disable_jit():
            jax.make_jaxpr(tx.update)(updates, state)
    finally:
        sys.setprofile(None)
    return functions


def test_table_names_the_files_and_functions_of_a_call_in_order():
    rows = re.findall(r"^\|.*\| `(\w+/\w+\.py)` \| (.*) \|$", ONE_CALL, re.MULTILINE)
    named = [
        (path, name) for path, cell in rows for name in re.findall("`(.*?)`", cell)
    ]
    called = traced_functions()
    files = {path for path, _ in called if not path.startswith("_arrays/")}
    assert files == {path for path, _ in named}
    rest = iter(called)
    assert not [each for each in named if each not in rest]


def test_numpy_equivalent_has_at_most_thirty_lines():
    lines = ONE_CALL.split("```python\n")[1].split("tx = ")[0].splitlines()
    assert 0 < len([line for line in lines if line]) <= 30


def test_kernels_of_the_compiled_step_are_those_of_the_benchmarks():
    benchmarks = (DOCS / "benchmarks.md").read_text()
    row = r"^\| global norm \| (\d+) [^|]*\| (\d+) \|"
    ((ours, optax),) = re.findall(row, benchmarks, re.MULTILINE)
    assert f"{ours} with this call and {optax} with the one of optax" in ONE_CALL
