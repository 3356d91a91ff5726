"""The blocks of pages that need other libraries, executed for the tests."""

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "integrations.md").read_text()
# The other blocks of these pages need no library, and are run by tests/docs.
OTHER_PAGES = ("muon_attention_singular_values.md", "private_training.md")
OTHER_LIBRARIES = re.compile(r"^(?:import|from) (?:flax|jax_privacy)\b", re.MULTILINE)


def blocks() -> dict[str, str]:
    """Return the code under each heading that has some."""
    found = _blocks_of(TEXT)
    for name in OTHER_PAGES:
        for title, code in _blocks_of((DOCS / name).read_text()).items():
            if OTHER_LIBRARIES.search(code):
                found[title] = code
    return found


def _blocks_of(text: str) -> dict[str, str]:
    # A heading has a blank line before it, so that no comment of a block is one.
    parts = re.split(r"(?:^|\n\n)#{1,3} (.+)\n", text)
    found = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        codes = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
        assert len(codes) < 2, f"{title} has {len(codes)} blocks"
        if codes:
            found[title] = codes[0]
    return found


def run(title: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute the block under a heading after `names`; return what it defined.

    It prints the words of the comments at its end. Their numbers may differ, since each
    version of a library initializes its layers in its own way.
    """
    code = blocks()[title]
    names = {} if names is None else names
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"docs, {title}", "exec"), names)
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    printed = out.getvalue().splitlines()
    assert [_words(line) for line in printed] == [_words(line) for line in said]
    return names


@functools.cache
def names(title: str) -> dict[str, Any]:
    """Return what a block defines, executed once: do not change it in place."""
    return run(title)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose first line starts with this cell."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]*\n((?:\|.*\n)+)", TEXT, re.M)
    assert table, f"no table of {heading}"
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table[1].splitlines()
    ]


def _words(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", line)
