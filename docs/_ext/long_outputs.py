"""Outputs of notebooks wrap if a line is far longer than the page is wide.

Such a line is a sentence, as in an error message. Shorter lines may be aligned, and
scroll on a phone.
"""

import html
import re

import page_body
from sphinx.application import Sphinx

OUTPUT = re.compile(r'(<div class="output )([^>]*>.*?</pre>)', re.DOTALL)
LONG = 150


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the outputs of each notebook before it is written."""
    return page_body.change(app, with_classes, below="notebooks/")


def with_classes(body: str) -> str:
    """Return the body of a notebook with the class of its long outputs."""
    return OUTPUT.sub(marked, body)


def marked(output: re.Match[str]) -> str:
    """Return an output with its class."""
    text = html.unescape(re.sub(r"<[^>]+>", "", output[2]))
    is_long = max(map(len, text.splitlines())) > LONG
    return f"{output[1]}long {output[2]}" if is_long else output[0]
