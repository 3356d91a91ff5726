"""Places in code where a table cell may break a line.

They are after `.`, `,` and `(`, if more than a few characters follow, and after `_` in
names of 16 characters or more. Without them a browser breaks long calls inside a word.
`<wbr>` is not copied with the text, unlike a space of no width. A mean and its
deviation, a range, three counts, and a number such as 1e-6 stay on one line.
"""

import re
from typing import Any

from sphinx.application import Sphinx

TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
CODE = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
NAME = re.compile(r"[A-Za-z]\w{15,}")
PLACE = re.compile(
    r"(?<=[a-zA-Z]\.)(?=[a-zA-Z_]{3})|(?<=,)(?=[a-zA-Z])|(?<=\()(?=[^\s)]{10})"
)

RANGE = re.compile(r"\d[\d.]* \(\d[\d.]*\u2013\d[\d.]*\)|\d+ / \d+ / \d+")
SMALL = re.compile(r"\d[\d.]*e-\d+")
UNBROKEN = r'<span class="unbroken">\g<0></span>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the places in each page before it is written."""
    app.connect("html-page-context", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mark(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Add the places to the tables of a page."""
    if "body" in context:
        body = context["body"]
        context["body"] = TABLE.sub(lambda table: with_places(table[0]), body)


def with_places(table: str) -> str:
    """Return a table with places in its code, and without any in its numbers."""
    table = CODE.sub(lambda code: marked(code[0]), table)
    return RANGE.sub(UNBROKEN, table).replace(" ± ", "\xa0±\xa0")


def marked(code: str) -> str:
    """Return code with its places."""
    code = PLACE.sub("<wbr>", code)
    code = NAME.sub(lambda name: re.sub(r"_(?=\w)", "_<wbr>", name[0]), code)
    return SMALL.sub(UNBROKEN, code)
