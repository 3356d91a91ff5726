"""The notebook of private training, whose libraries the suite does not install."""

import pytest

from tests.support import notebooks


@pytest.mark.parametrize(
    "path", notebooks.named(stacks=True), ids=lambda path: path.stem
)
# The client's socket and event loop clean-up warns on some platforms.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs(path, monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebooks.check(path, tmp_path)
