"""Run every notebook from top to bottom."""

import re

import nbformat
import pytest

from tests.support import notebooks

IN_SUITE, IN_STACKS = (notebooks.named(stacks=flag) for flag in (False, True))


@pytest.mark.parametrize("path", IN_SUITE + IN_STACKS, ids=lambda path: path.stem)
def test_notebook_cells_have_no_assert(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert not [text for text in code if re.search(r"^\s*assert ", text, re.MULTILINE)]


@pytest.mark.parametrize("path", IN_SUITE, ids=lambda path: path.stem)
# The notebook client warns on some platforms when it closes sockets and event loops.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs_without_error(path, monkeypatch, tmp_path):
    notebooks.check(path, tmp_path, monkeypatch)
