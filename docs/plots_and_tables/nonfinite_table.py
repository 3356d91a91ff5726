"""Write the table of `docs/nan_and_inf.md`.

Run `python -m docs.plots_and_tables.nonfinite_table`.

The page states in a sentence how the other policies differ from this one.
`tests/clip/test_nonfinite.py` tests the cells of every policy.
"""

import pathlib
import re

import numpy as np

from tests.support.nonfinite_cells import (
    INPUTS,
    SCOPES,
    Cell,
    Entry,
    dense,
    expected,
    unit,
)

PAGE = pathlib.Path(__file__).resolve().parents[1] / "nan_and_inf.md"
# The same for every scope.
OFF_PAGE = {"all", "mask"}


def table() -> str:
    """Format the cells of `"propagate"` in Markdown.

    Inputs with the same outcomes share a row.
    """
    titles: dict[str, list[str]] = {}
    for given, case in INPUTS.items():
        if given not in OFF_PAGE:
            outcomes = (_words(Cell("propagate", given, scope)) for scope in SCOPES)
            titles.setdefault(" | ".join(outcomes), []).append(case.title)
    head = '| `"propagate"` | ' + " | ".join(SCOPES) + " |"
    rows = [f"| {'; '.join(same)} | {row} |" for row, same in titles.items()]
    return "\n".join([head, "|---" * (len(SCOPES) + 1) + "|", *rows])


def with_table(page: str) -> str:
    """Return the page with the current table."""
    marked = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
    return marked.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", page)


def _wrong(cell: Cell) -> list[Entry]:
    """Return the non-finite entries of the dense gradient."""
    return [e for e, x in dense(cell.input).items() if not np.isfinite(x)]


def _words(cell: Cell) -> str:
    """Return the outcome in a few words; unnamed entries are clipped as usual."""
    before, after = dense(cell.input), expected(cell)
    bad, leaf = _wrong(cell), {e for e in before if e[0] == cell.input.leaf}
    same = {e for e in before if np.array_equal(before[e], after[e], equal_nan=True)}
    unchanged = bool(leaf) and leaf <= same
    lost = {e for e, x in after.items() if x == 0 or np.isnan(x)}
    lost -= leaf if unchanged else set()
    parts = []
    if lost:
        state = "NaN" if any(np.isnan(after[e]) for e in lost) else "zero"
        parts.append(f"{_name(lost, bad)} {state}")
    if unchanged:
        parts.append("leaf unchanged")
    return ", ".join(parts) or "entry at the bound"


def _name(lost: set[Entry], bad: list[Entry]) -> str:
    """Name a set of entries relative to the bad ones."""

    def around(scope):
        return {e for e in dense(None) if unit(scope, e) == unit(scope, bad[0])}

    named = {
        "all": around("tree"),
        "entry": set(bad),
        "its slice": around("axes"),
        "its leaf": around("leaf"),
        "its group": around("groups"),
        "the others": around("tree") - around("leaf"),
        "the rest of its group": around("groups") - around("leaf"),
    }
    return next(name for name, part in named.items() if lost == part)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
