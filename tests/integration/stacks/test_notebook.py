"""The notebook of private training, which needs libraries that the suite has not."""

import pytest

from tests.support import notebooks


@pytest.mark.parametrize(
    "path", notebooks.named(stacks=True), ids=lambda path: path.stem
)
# The client's own socket and event loop clean-up warns on some platforms.
@pytest.mark.filterwarnings("ignore")
def test_notebook(path, monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebooks.check(path, tmp_path)
