"""Outputs of notebooks wrap if a line is far longer than the page is wide.

Such a line is a sentence, as in an error message. Shorter lines may be aligned, and
scroll on a phone.
"""

import html
import re
from typing import Any

from sphinx.application import Sphinx

OUTPUT = re.compile(r'(<div class="output )([^>]*>.*?</pre>)', re.DOTALL)
LONG = 150


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the outputs of each page before it is written."""
    app.connect("html-page-context", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mark(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Set the class of long outputs of a notebook."""
    if page.startswith("notebooks/") and "body" in context:
        context["body"] = OUTPUT.sub(marked, context["body"])


def marked(output: re.Match[str]) -> str:
    """Return an output with its class."""
    text = html.unescape(re.sub(r"<[^>]+>", "", output[2]))
    is_long = max(map(len, text.splitlines())) > LONG
    return f"{output[1]}long {output[2]}" if is_long else output[0]
