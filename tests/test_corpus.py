"""Every transformation on every tree of the corpus, eager and compiled."""

import numpy as np
import pytest

from tests import corpus, helpers
from tests.registry import ENTRIES

TREES = list(corpus.corpus())


def test_there_are_64_trees_of_unlike_names():
    assert len({tree.name for tree in TREES}) == len(TREES) >= 64


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_the_formula_holds(entry, run):
    def update(tree, threshold):
        tx = helpers.strict(entry.make(threshold))
        return tx.update(tree, tx.init(tree))[0]

    def update_by_rule(tree, threshold):
        del threshold
        tx = helpers.strict(entry.make())
        return tx.update(tree, tx.init(tree))[0]

    clip = run(update if entry.scalar_threshold else update_by_rule)
    active = entry.threshold[1] if entry.scalar_threshold else 1.0
    failures, num_clipped = [], 0
    for case in TREES:
        tree = case.make()
        # Two bounds would both have to be scaled.
        scale = 1.0 if entry.id == "value-two-bounds" else case.scale
        threshold = np.float32(active * scale)
        found = clip(tree, threshold)
        helpers.assert_same_types(found, tree)
        num_clipped += helpers.differs(found, tree)
        with np.errstate(over="ignore", under="ignore"):
            expected = entry.expected(helpers.as_xla_sees(tree), float(threshold))
        problem = helpers.wrong(found, expected, tree)
        if problem:
            failures.append(f"{case.name}: {problem}")
    assert not failures, "\n".join(failures)
    assert num_clipped > len(TREES) / 3
