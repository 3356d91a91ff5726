"""Run the notebook on private training, whose libraries the suite does not install."""

import pytest

from tests.support import notebooks


@pytest.mark.parametrize(
    "path", notebooks.named(stacks=True), ids=lambda path: path.stem
)
# The notebook client warns on some platforms when it closes sockets and event loops.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs(path, monkeypatch, tmp_path):
    notebooks.check(path, tmp_path, monkeypatch)
