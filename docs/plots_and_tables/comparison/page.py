"""Run both sides of each row, and write the results as the table of the page."""

import contextlib
import functools
import io
import pathlib
import re
from typing import Any

import optax

from docs.plots_and_tables.comparison import show
from docs.plots_and_tables.comparison.rows import ROWS, Row
from docs.plots_and_tables.comparison.sides import Side

PATH = pathlib.Path(__file__).resolve().parents[2] / "migrating.md"
MARKED = re.compile(
    r"(?<=<!-- incumbents -->\n).*?(?=<!-- end of incumbents -->)", re.DOTALL
)


@functools.cache
def result(row: Row, side: Side) -> Any:
    """Run a side of a row; each side is run once in a process."""
    # JAX prints a message under jax.debug_nans.
    with contextlib.redirect_stdout(io.StringIO()):
        return side(row.run)


def observed(row: Row, side: Side) -> str:
    """Return the result of a side in a few characters, or the class of its error."""
    try:
        return show.text(row.show(result(row, side)))
    except Exception as error:
        return type(error).__name__


def new_table() -> str:
    """Run all rows and return the table."""
    head = f"| input | optax {optax.__version__} | optclip |\n|---|---|---|\n"
    return head + "".join(_line(row) for row in ROWS)


def current_table() -> str:
    """Return the table on the page."""
    (table,) = MARKED.findall(PATH.read_text())
    return table


def with_table(page: str) -> str:
    """Return the page with a new table."""
    table = new_table()
    return MARKED.sub(lambda match: table, page)


def _line(row: Row) -> str:
    theirs, ours = observed(row, row.theirs), observed(row, row.ours)
    note = f" ({row.note})" if row.note else ""
    return f"| {row.text} | `{theirs}` | `{ours}`{note} |\n"
