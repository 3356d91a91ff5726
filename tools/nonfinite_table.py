"""Write the table of `docs/nan_and_inf.md`: `python -m tools.nonfinite_table`.

The page states in a sentence how the other policies differ from this one.
`tests/clip/test_nonfinite.py` tests the cells of every policy.
"""

import pathlib
import re

from tests.support.nonfinite_cells import INPUTS, SCOPES, Cell, words

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "nan_and_inf.md"
# The same for every scope.
OFF_PAGE = {"all", "mask"}


def table() -> str:
    """Format the cells of `"propagate"` in Markdown.

    Inputs with the same outcomes share a row.
    """
    titles: dict[str, list[str]] = {}
    for given, case in INPUTS.items():
        if given not in OFF_PAGE:
            outcomes = (words(Cell("propagate", given, scope)) for scope in SCOPES)
            titles.setdefault(" | ".join(outcomes), []).append(case.title)
    head = '| `"propagate"` | ' + " | ".join(SCOPES) + " |"
    rows = [f"| {'; '.join(same)} | {row} |" for row, same in titles.items()]
    return "\n".join([head, "|---" * (len(SCOPES) + 1) + "|", *rows])


def with_table(page: str) -> str:
    """Return the page with the current table."""
    marked = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
    return marked.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
