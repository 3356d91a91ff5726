"""Execute the code blocks of pages that need other libraries."""

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "integrations.md").read_text()
# tests/integration/examples runs the blocks of these pages that need no other library.
OTHER_PAGES = (
    "backward_pass_clipping.md",
    "muon_attention_singular_values.md",
    "private_training.md",
    "production_runs.md",
)
OTHER_LIBRARIES = re.compile(
    r"^(?:import|from) (?:diffrax|flax|jax_privacy|orbax)\b", re.M
)


def blocks() -> dict[str, str]:
    """Return the code block under each heading."""
    blocks = _blocks_of(TEXT)
    for name in OTHER_PAGES:
        for title, code in _blocks_of((DOCS / name).read_text()).items():
            if OTHER_LIBRARIES.search(code):
                blocks[title] = code
    return blocks


def _blocks_of(text: str) -> dict[str, str]:
    # A blank line precedes headings, which distinguishes them from comments in blocks.
    parts = re.split(r"(?:^|\n\n)#{1,3} (.+)\n", text)
    blocks = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        codes = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
        assert len(codes) < 2, f"{title} has {len(codes)} blocks"
        if codes:
            blocks[title] = codes[0]
    return blocks


def run(title: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute the block under a heading with `names`; return its namespace.

    The output must have the words of the block's comments. Numbers may differ, since
    the initialization of layers depends on the version of a library.
    """
    code = blocks()[title]
    names = {} if names is None else names
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"docs, {title}", "exec"), names)
    comments = re.findall(r"^# (.*)$", code, re.MULTILINE)
    printed = out.getvalue().splitlines()
    assert [_words(line) for line in printed] == [_words(line) for line in comments]
    return names


@functools.cache
def names(title: str) -> dict[str, Any]:
    """Return the cached namespace of a block, which must not be changed in place."""
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
