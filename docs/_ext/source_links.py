"""Links between the pages of the API and the code, which Sphinx's viewcode copies.

A public name is defined in a private module, and a class states a public one as its
module, so viewcode would miss the definition.
"""

import importlib
import re
import sys
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

# Viewcode adds an anchor of another page if two modules export a name.
WRONG_ANCHOR = re.compile(
    r'(<a class="viewcode-back" href="[./]+/api/([\w.]+?)(-class)?\.html)#(?!\2\b)[^"]*'
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Find each definition, and correct the links of each page of code."""
    app.setup_extension("sphinx.ext.viewcode")
    app.connect("viewcode-follow-imported", defining_module)
    app.connect("html-page-context", without_wrong_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def without_wrong_anchors(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Delete the anchors of other pages from the links of a page of code."""
    if page.startswith("_modules/") and "body" in context:
        context["body"] = WRONG_ANCHOR.sub(r"\1", context["body"])


def defining_module(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module in which the class or function of a public name is defined."""
    root = name.partition(".")[0]
    value = getattr(importlib.import_module(module), root, None)
    for each, loaded in sorted(sys.modules.items()):
        if each.startswith("optclip.") and getattr(loaded, root, None) is value:
            analyzer = ModuleAnalyzer.for_module(each)
            analyzer.find_tags()
            if root in analyzer.tags:
                return each
    return None
