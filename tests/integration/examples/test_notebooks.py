"""Run every notebook from top to bottom."""

import pytest

from tests.support import notebooks


@pytest.mark.parametrize(
    "path", notebooks.named(stacks=False), ids=lambda path: path.stem
)
# The notebook client warns on some platforms when it closes sockets and event loops.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs_without_error(path, monkeypatch, tmp_path):
    notebooks.check(path, tmp_path, monkeypatch)
