"""The lines of optimized programs, which the load of the machine does not change."""

import pytest

from benchmarks import compile
from tests.support import compiler

# The most lines over those of the nearest optax transformation.
LIMITS = {
    ("72 layers", "global norm"): 1.1,
    ("72 layers", "leaf"): 1.2,
    ("72 layers", "agc"): 1.5,
    ("narrow llama", "global norm"): 1.2,
    ("narrow llama", "leaf"): 1.5,
    ("narrow llama", "agc"): 2.1,
    ("500", "skip"): 0.5,
}


@pytest.mark.parametrize(("tree", "clip"), LIMITS)
def test_program_has_few_more_lines_than_of_optax(tree, clip):
    pair = compile.CLIPS[clip]
    options = compiler.OPTIMIZED
    ours, theirs = (
        compile.lines(pair[name](), tree, options) for name in ("optclip", "optax")
    )
    assert 0 < ours <= LIMITS[tree, clip] * theirs
