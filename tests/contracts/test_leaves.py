"""Every transformation on scalars, empty trees and strings.

All kinds of array leaves, clipped or not, are in arrays/test_leaf_kinds.py.
"""

import jax
import numpy as np
import pytest

import optclip
from tests.support import helpers
from tests.support.registry import ENTRIES, by_trait

every, each_trait = (
    pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.id)
    for entries in (ENTRIES, by_trait())
)
TREE = helpers.gradients()
SCALARS = {"dense": 30.0, "out": [40.0, 0.0625]}


@each_trait
def test_python_scalar_becomes_weakly_typed_and_is_clipped(entry):
    """Scalars have no axes and no singular values."""
    tx = helpers.tx_without_promotion(entry.make())
    if entry.kwargs.get("axis") or entry.id == "layers":
        with pytest.raises(
            ValueError, match=r"`axis` must .*\(0,\).*leaf 'dense'.*mask="
        ):
            helpers.quickly_clipped(tx, SCALARS)
        return
    clipped = helpers.quickly_clipped(tx, SCALARS)
    wide = helpers.as_float64(SCALARS)
    helpers.assert_same_types(clipped, SCALARS)
    assert helpers.differs(clipped, SCALARS) == (not entry.of_matrices)
    helpers.assert_close(clipped, wide if entry.of_matrices else entry.expected(wide))


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.id in ("value", "norm")])
def test_leaf_that_no_compiled_function_takes_passes(entry):
    passed = {"float0": np.zeros(2, jax.dtypes.float0), "int": 7, "bool": True}
    tree = {"out": TREE["out"], "passed": passed}
    found = helpers.clipped(helpers.tx_without_promotion(entry.make()), tree)
    for name, leaf in passed.items():
        assert type(found["passed"][name]) is type(leaf)
        np.testing.assert_array_equal(found["passed"][name], leaf)
    assert helpers.differs(found["out"], TREE["out"])


@every
def test_tree_without_arrays_is_returned_and_string_is_named(entry):
    tx = helpers.tx_without_promotion(entry.make())
    for tree in ({}, [], None, {"dense": {}, "out": []}, {"dense": None}):
        clipped, state = tx.update(tree, tx.init(tree))
        assert clipped == tree
        for key, number in optclip.metrics(state).items():
            assert number == 0 or not {"norm", "nonfinite"} & {*key.split("/")}
    tree = {**TREE, "dense": {**TREE["dense"], "label": "text"}}
    for call in (tx.init, lambda tree: tx.update(tree, tx.init(TREE))):
        with pytest.raises(TypeError, match=r"'dense/label' must be .*str.*Remove it"):
            call(tree)
