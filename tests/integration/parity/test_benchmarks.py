"""Run the PyTorch rows of `python -m benchmarks gpu` on the CPU."""

from benchmarks.gpu import matrices, models


def test_torch_rows_are_timed():
    rows = [*models.clipping(True), *models.stepping(True), *matrices.mixed(True)]
    torch_rows = [row for row in rows if row["contender"].startswith("PyTorch")]
    assert [row["contender"] for row in torch_rows] == [
        "PyTorch", "PyTorch, precomputed norm", "PyTorch", "PyTorch, unclipped",
        "PyTorch", "PyTorch, precomputed norm",
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in torch_rows)
