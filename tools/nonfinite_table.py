"""Write the table of `docs/nan_and_inf.md`: `python -m tools.nonfinite_table`.

`tests/clip/test_nonfinite.py` tests its cells.
"""

import pathlib
import re

from tests.support.nonfinite_cells import INPUTS, POLICIES, SCOPES, Cell, words

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "nan_and_inf.md"


def table() -> str:
    """Format all cells in Markdown, one table per policy.

    Inputs with the same outcomes share a row.
    """
    lines = []
    for policy in POLICIES:
        head = f"| `{policy!r}` | " + " | ".join(SCOPES) + " |"
        lines += ["", head.replace("'", '"'), "|---" * (len(SCOPES) + 1) + "|"]
        titles: dict[str, list[str]] = {}
        for given, case in INPUTS.items():
            outcomes = (words(Cell(policy, given, scope)) for scope in SCOPES)
            titles.setdefault(" | ".join(outcomes), []).append(case.title)
        lines += [f"| {'; '.join(same)} | {row} |" for row, same in titles.items()]
    return "\n".join(lines[1:])


def with_table(page: str) -> str:
    """Return the page with the current table."""
    marked = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
    return marked.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
