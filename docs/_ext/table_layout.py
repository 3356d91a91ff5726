"""Classes by which the style sheet lays out tables: `gallery`, and `stacked` on phones.

Three columns of words are narrow on a phone. There each row of a stacked table is a
card, in which the name of the column precedes each cell. Numbers that are to be
compared stay in columns. In a gallery each row is a card everywhere.
"""

import html
import re

import page_body
from sphinx.application import Sphinx

TABLE = re.compile(r'<table class="table">(.*?)</table>', re.DOTALL)
ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
CELL = re.compile(r"<t([hd])([^>]*)>(.*?)</t[hd]>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
LINK = re.compile(r'<a [^>]*href="([^"]*)"')
IMAGE = re.compile(r"<img [^>]*>")
NUMBER = re.compile(r"[-\u2212]?\d|none$|$")
MANY = 0.4
SHORT = 25  # Characters of a cell that is no sentence.
SENTENCE = 70  # Mean characters of first cells that are more than labels.
NOTHING = ("", "\u2013")


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the tables of each page before it is written."""
    return page_body.change(app, with_classes)


def with_classes(body: str) -> str:
    """Return the body of a page with the classes of its tables."""
    return TABLE.sub(lambda table: laid_out(table[1]), body)


def laid_out(rows: str) -> str:
    """Return a table with its class, and with its labels if it is stacked."""
    head, middle, body = rows.partition("</thead>")
    labels = [text(cell[3]) for cell in CELL.finditer(head)]
    if "<img" in body:
        body = ROW.sub(lambda row: with_linked_image(row[0]), body)
        return f'<table class="table gallery">{head}{middle}{body}</table>'
    if not body or stays_in_columns(body):
        return f'<table class="table">{rows}</table>'
    sizes = [len(text(CELL.search(row)[3])) for row in ROW.findall(body)]
    kind = "stacked sentences" if sum(sizes) > SENTENCE * len(sizes) else "stacked"
    body = ROW.sub(lambda row: labeled(row[0], labels), body)
    return f'<table class="table {kind}">{head}{middle}{body}</table>'


def stays_in_columns(body: str) -> bool:
    """Return whether a phone can show the columns side by side."""
    rows = [[text(cell[3]) for cell in CELL.finditer(row)] for row in ROW.findall(body)]
    first, *others = zip(*rows, strict=True)
    is_long = [max(map(len, column)) > SHORT for column in (first, *others)]
    if len(others) < 2:
        return not all(is_long)
    values = [value for column in others for value in column]
    numbers = sum(map(bool, map(NUMBER.match, values)))
    return not any(is_long[1:]) and numbers >= MANY * len(values)


def with_linked_image(row: str) -> str:
    """Return a row of a gallery whose image leads to the page of its title."""
    link = LINK.search(row)
    target = f'<a href="{link[1]}">' if link else "<a>"
    return IMAGE.sub(rf"{target}\g<0></a>", row)


def labeled(row: str, labels: list[str]) -> str:
    """Return a row whose cells state the names of their columns."""
    names = iter(labels)

    def with_label(cell: re.Match[str]) -> str:
        kind, attributes, content = cell.groups()
        label = html.escape(next(names), quote=True)
        # Cards exclude cells without a label.
        states = label and text(content) not in NOTHING
        name = f' data-label="{label}"' if states else ""
        return f"<t{kind}{attributes}{name}>{content}</t{kind}>"

    return CELL.sub(with_label, row)


def text(cell: str) -> str:
    """Return the text of a cell."""
    return html.unescape(TAG.sub("", cell)).strip()
