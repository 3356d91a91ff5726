"""Links between the pages of the API and the code, which Sphinx's viewcode copies.

A public name is defined in a private module, and a class states a public one as its
module, so viewcode would miss the definition. A name that two modules export has two
pages, and viewcode's link back would mix their addresses.
"""

import importlib
import re
import sys

import page_body
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

BACK = re.compile(
    r'(<a class="viewcode-back" href="[^"]*?)([\w.]+)(-class)?\.html#[^"]*'
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Find each definition, and correct the links of each page of code."""
    app.setup_extension("sphinx.ext.viewcode")
    app.connect("viewcode-follow-imported", defining_module)
    return page_body.change(app, with_links_back, below="_modules/")


def defining_module(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module in which the class or function of a public name is defined."""
    root = name.partition(".")[0]
    value = getattr(importlib.import_module(module), root, None)
    for each in sorted(sys.modules):
        imports = each.startswith("optclip.") and hasattr(sys.modules[each], root)
        if imports and getattr(sys.modules[each], root) is value:
            analyzer = ModuleAnalyzer.for_module(each)
            analyzer.find_tags()
            if root in analyzer.tags:
                return each
    return None


def with_links_back(body: str) -> str:
    """Return the body of a page of code; each definition links to its own page."""
    return BACK.sub(anchored, body)


def anchored(link: re.Match[str]) -> str:
    """Return the link with the name of its page, or of a method there, as anchor."""
    start, full, end = link[1], link[2], link[3] or ""
    old = link[0].rpartition("#")[2]
    method = old.partition(f".{full.rpartition('.')[2]}.")[2]
    return f"{start}{full}{end}.html#{full}{method and '.' + method}"
