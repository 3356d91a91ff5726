"""Places where a line may break in the code of tables, in long code, and in names.

They are after `,` and `(`, if more than a few characters follow; in a paragraph also
after `.`, `=` and `/` in long code; in a title after each `.` and `_`. Without them a
browser breaks calls and titles inside a word. In a table a name stays on one line, as
do a mean and its deviation, a range, three counts, and a number such as 1e-6; and an
option such as `-s` everywhere. `<wbr>` is not copied with the text, unlike a space of
no width.
"""

import re
from typing import Any

import page_body
from sphinx.application import Sphinx

TABLE = re.compile(r"(<table.*?</table>)", re.DOTALL)
TITLE = re.compile(r"(?<=<h1>)[\w.]+(?=<a )")
CODE = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
PLACE = re.compile(r"(?<=,)(?=[a-zA-Z])|(?<=\()(?=[^\s)]{10})")
IN_LONG = re.compile(
    r"(?<=[a-zA-Z]\.)(?=[a-zA-Z_]{3})|(?<=[a-zA-Z]=)(?=[a-zA-Z]{5})|(?<=\w/)(?=\w)"
)
LONG = 34  # Characters that hardly fit in a line on a phone.

RANGE = re.compile(r"(\d[\d.]*) (\(\d[\d.]*\u2013\d[\d.]*\))")
COUNTS = re.compile(r"\d+ / \d+ / \d+")
SMALL = re.compile(r"\d[\d.]*e-\d+")
OPTION = re.compile(r"^-{1,2}[a-z][\w-]*$")
UNBROKEN = r'<span class="unbroken">\g<0></span>'
# On a phone a range may be below its mean.
WITH_RANGE = r'<span class="with-range">\1 <span class="unbroken">\2</span></span>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the places in each page before it is written."""
    app.connect("html-page-context", mark_neighbors)
    return page_body.change(app, with_places)


def mark_neighbors(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Add the places to the links to the pages before and after."""
    for neighbor in ("prev", "next"):
        if context.get(neighbor):
            title = marked_title(context[neighbor]["title"])
            context[neighbor] = {**context[neighbor], "title": title}


def with_places(body: str) -> str:
    """Return the body of a page with places in its tables, long code and title."""
    parts = TABLE.split(body)
    for k, part in enumerate(parts):
        is_table = k % 2
        parts[k] = marked_table(part) if is_table else marked_text(part)
    return "".join(parts)


def marked_text(text: str) -> str:
    """Return text between tables with places in its long code and title."""
    text = CODE.sub(lambda code: marked_if_long(code[0]), text)
    return TITLE.sub(lambda title: marked_title(title[0]), text)


def marked_table(table: str) -> str:
    """Return a table with places in its code, and without any in its numbers."""
    table = CODE.sub(lambda code: marked(code[0]), table)
    table = COUNTS.sub(UNBROKEN, RANGE.sub(WITH_RANGE, table))
    return table.replace(" ± ", "\xa0±\xa0")


def marked(code: str) -> str:
    """Return code with its places."""
    return SMALL.sub(UNBROKEN, PLACE.sub("<wbr>", code))


def marked_if_long(code: str) -> str:
    """Return code of a paragraph, with its places if it is long."""
    code = OPTION.sub(UNBROKEN, code)
    return marked(IN_LONG.sub("<wbr>", code)) if len(code) > LONG else code


def marked_title(title: str) -> str:
    """Return a title, with places if it is the name of a module or of its content."""
    return re.sub(r"(?<=[._])(?=\w)", "<wbr>", title) if " " not in title else title
