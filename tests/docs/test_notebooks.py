"""Every notebook runs from top to bottom, and keeps its pictures."""

import re

import nbformat
import pytest

from tests.support import notebooks

ALL = notebooks.named(stacks=False) + notebooks.named(stacks=True)


def test_there_are_notebooks():
    assert len(notebooks.named(stacks=False)) > 5
    assert {path.stem for path in notebooks.named(stacks=True)} == notebooks.IN_STACKS


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_asserts_are_in_cells_that_the_site_hides(path):
    shown = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        and "remove-cell" not in cell.metadata.get("tags", [])
    ]
    assert not [code for code in shown if re.search(r"^\s*assert ", code, re.MULTILINE)]


@pytest.mark.parametrize(
    "path", notebooks.named(stacks=False), ids=lambda path: path.stem
)
# The client's own socket and event loop clean-up warns on some platforms.
@pytest.mark.filterwarnings("ignore")
def test_notebook(path, monkeypatch, tmp_path):
    for name, value in {
        "IPYTHONDIR": str(tmp_path),
        **notebooks.environment(),
    }.items():
        monkeypatch.setenv(name, value)
    notebooks.check(path, tmp_path)
