"""The sidebar lists the names of a module without the module, which is above them.

A name in full is wider than the sidebar, and would break inside a word.
"""

import re
from typing import Any

from sphinx.application import Sphinx

NAME = re.compile(
    r'(<li class="toctree-l3[^>]*><a [^>]*>)optclip\.(?:\w+\.)?(?=\w+</a>)'
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Change the sidebar of each page before it is written."""
    # After the theme, whose function makes the sidebar.
    app.connect("html-page-context", shorten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def shorten(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Remove the module from the names that the theme's function returns."""
    if "generate_toctree_html" in context:
        whole = context["generate_toctree_html"]
        context["generate_toctree_html"] = lambda kind, **options: NAME.sub(
            r"\1", str(whole(kind, **options))
        )
