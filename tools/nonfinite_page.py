"""The table of `docs/nan_and_inf.md`, whose cells `tests/clip/test_nonfinite.py` runs.

python -m tools.nonfinite_page     # writes the page with the table as it should be
"""

import pathlib
import re

from tests.support.nonfinite_cells import INPUTS, POLICIES, SCOPES, Cell, words

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "nan_and_inf.md"


def table() -> str:
    """All cells in Markdown, one table for each policy.

    Inputs with the same outcomes are on one line.
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


def written(page: str) -> str:
    """The page with the table as it should be."""
    marked = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
    return marked.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
