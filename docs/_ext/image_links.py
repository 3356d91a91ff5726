"""Each plot on a page links to its file, since a phone shows it too small to read."""

import re

import page_body
from sphinx.application import Sphinx

IMAGE = re.compile(r'(?<!">)<img [^>]*src="([^":]*)"[^>]*>')
LINKED = r'<a class="plot" href="\1">\g<0></a>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Wrap the images of each page before it is written."""
    # Afterwards, images of a gallery are links already.
    return page_body.change(app, linked, priority=600)


def linked(body: str) -> str:
    """Return the body of a page with links around its images."""
    return IMAGE.sub(LINKED, body)
