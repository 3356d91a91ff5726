"""Each plot on a page links to its file, since a phone shows it too small to read."""

import re
from typing import Any

from sphinx.application import Sphinx

IMAGE = re.compile(r'(?<!">)<img [^>]*src="([^":]*)"[^>]*>')
LINKED = r'<a class="plot" href="\1">\g<0></a>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Wrap the images of each page before it is written."""
    # Afterwards, images of a gallery are links already.
    app.connect("html-page-context", wrap, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def wrap(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Link the images of a page."""
    if "body" in context:
        context["body"] = IMAGE.sub(LINKED, context["body"])
