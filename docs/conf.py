"""The site: `nox -s docs -- serve` builds it from these pages and shows it."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import optclip  # noqa: E402

project = "optclip"
author = "The optclip maintainers"
version = release = optclip.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_llm.txt",
    "sphinxext.opengraph",
    "gather",
    "autodoc_fixes",
    "name_links",
    "search_words",
    "source_links",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]
nitpicky = True
# Docstrings write code in single backticks; `name_links` links names in it.
default_role = "literal"

# The notebooks keep their outputs; the nox session `examples` runs them. The site
# collapses cells tagged "hide-input".
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 3

autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_default_options = {"no-value": True}
napoleon_custom_sections = ["Guarantees", "Edge cases"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_typehints_format = "short"
# Signatures name these as code does, instead of a union or of a private module.
autodoc_type_aliases = {
    "Axes": "~matplotlib.axes.Axes",
    "jax.Array": "~jax.Array",
    "optax.GradientTransformation": "~optax.GradientTransformation",
    "optax.GradientTransformationExtraArgs": "~optax.GradientTransformationExtraArgs",
} | {name: f"~optclip.typing.{name}" for name in optclip.typing.__all__}
# These types have no page of their own.
PRIVATE_TYPES = (
    "AxisName",
    "ClipOptions",
    "Labels",
    "MatrixAxes",
    "MomentClipOptions",
    "Nonfinite",
    "Number",
    "NumberOrSchedule",
    "Record",
    "Relative",
    "SkipOptions",
    "ThresholdTree",
)
autodoc_type_aliases |= {name: name for name in PRIVATE_TYPES}
python_maximum_signature_line_length = 80

# Lists of the names of other sites are fetched where the site is published. Elsewhere
# the build wants no network, and names of others are no links.
online = "READTHEDOCS" in os.environ or "OPTCLIP_INTERSPHINX" in os.environ
intersphinx_mapping = {
    "flax": ("https://flax.readthedocs.io/en/latest/", None),
    "jax": ("https://docs.jax.dev/en/latest/", None),
    "numpy": ("https://numpy.org/doc/stable/", None),
    "optax": ("https://optax.readthedocs.io/en/latest/", None),
    "python": ("https://docs.python.org/3/", None),
}
intersphinx_mapping = intersphinx_mapping if online else {}
nitpick_ignore_regex = [
    ("py:.*", r"(collections|jax|matplotlib|numpy|optax|os|typing)\..*"),
    # A public function may return an object of a private class, such as `Groups`.
    ("py:class", r"optclip\..*\._.*"),
    # The entries of an `Explanation`, which its docstring describes.
    ("py:class", "Leaf|Contribution|Outlier"),
    ("py:class", "|".join(PRIVATE_TYPES)),
]

# What is copied is what is typed: no prompts, nothing that is printed.
copybutton_exclude = ".linenos, .gp, .go"

# The addresses of the repository and the site, as in hatch_build.py. Without them no
# page has a link to the repository or a tag with an absolute address.
repository = os.environ.get("OPTCLIP_REPOSITORY", "").rstrip("/")
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL") or os.environ.get(
    "OPTCLIP_DOCUMENTATION", ""
)

# The description of each page is its first sentences, as far as search engines show it.
ogp_site_url = html_baseurl
ogp_image = "_static/card.png"
ogp_description_length = 160
ogp_custom_meta_tags = ['<meta name="twitter:card" content="summary_large_image" />']

# The site as text for language models: `llms.txt`, all pages in `llms-full.txt`, and
# each page in Markdown, whose address is that of the page with `.md` appended.
llms_txt_description = "Gradient clipping for JAX: functions, optax transformations"
markdown_http_base = html_baseurl
llms_txt_full_build = True
llms_txt_nested_enabled = False
llms_txt_suffix_mode = "append"
# Writes the text from the pages that were read for the site.
llms_txt_build_parallel = False
llms_txt_suppress_unknown_node_warnings = True

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["scroll_hint.js"]
html_search_scorer = str(HERE / "_ext" / "search_scorer.js")
html_favicon = "_static/logo.svg"
html_title = "optclip: gradient clipping for JAX"
# The download button of a notebook leads to its copy.
html_copy_source = True
html_show_sourcelink = False
html_theme_options = {
    "footer_content_items": ["author", "text_links"],
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "text": f"optclip <small>{version}</small>",
    },
    "navbar_persistent": [],
    # The landing page needs its width for the figure.
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "use_download_button": True,
}
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "use_issues_button": True,
        "use_repository_button": True,
    }
