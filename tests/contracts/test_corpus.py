"""Every transformation on the trees of the corpus, against its formula."""

import pathlib

import numpy as np
import pytest

from tests.support import corpus, helpers
from tests.support.covering import RUNS
from tests.support.registry import BY_SCOPE, ENTRIES

PROMISES = pathlib.Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def test_there_are_as_many_trees_as_is_promised():
    trees = list(corpus.corpus())
    assert len({tree.name for tree in trees}) == len(trees)
    assert f"on {len(trees)} adversarial trees" in PROMISES.read_text()


@pytest.mark.covering(entry=ENTRIES, dtype=helpers.DTYPES, run=RUNS)
def test_magnitudes_ties_and_zeros(entry, dtype, run):
    trees = list(corpus.patterns(dtype))
    num_clipped = sum(is_clipped_right(clip_of(entry, run), entry, t) for t in trees)
    assert num_clipped > len(trees) / 3


@pytest.mark.covering(entry=BY_SCOPE, name=tuple(corpus.STRUCTURES))
def test_every_structure_is_clipped_by_the_formula(entry, name):
    """What a tree is made of is met by what shares a norm; responses never see it."""
    (tree,) = corpus.structures(name)
    is_clipped_right(clip_of(entry, helpers.quick_jit), entry, tree)


def clip_of(entry, run):
    def update(tree, threshold):
        tx = helpers.strict(entry.make(threshold if entry.scalar_threshold else None))
        return tx.update(tree, tx.init(tree))[0]

    return run(update)


def is_clipped_right(clip, entry, case):
    """Whether anything was clipped; an error if it is not what the formula gives."""
    tree = case.make()
    active = entry.threshold[1] if entry.scalar_threshold else 1.0
    # Two bounds would both have to be scaled.
    scale = 1.0 if entry.id == "value-two-bounds" else case.scale
    threshold = np.float32(active * scale)
    found = clip(tree, threshold)
    helpers.assert_same_types(found, tree)
    with np.errstate(over="ignore", under="ignore"):
        expected = entry.expected(helpers.as_xla_sees(tree), float(threshold))
    problem = helpers.wrong(found, expected, tree, entry.roundings)
    assert problem is None, f"{case.name}: {problem}"
    return helpers.differs(found, tree)
