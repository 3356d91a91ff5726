"""Every transformation on leaves that pass, scalars, empty trees and bare arrays.

All kinds that are clipped stand side by side in test_leaf_kinds.py, and every dtype of
gradients is under the formulas of test_values.py. So most gradients here are
float32: what passes, and how a tree is walked, does not depend on the dtype beside it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import helpers
from tests.support.covering import RUNS
from tests.support.registry import ENTRIES, numpy_tree

every = pytest.mark.covering(entry=ENTRIES, run=RUNS)

PASSED = {
    "int": jnp.arange(4),
    "bool": jnp.array([True, False]),
    "float0": np.zeros((2,), jax.dtypes.float0),
    "key": jax.random.key(0),
    "uint8": np.arange(3, dtype=np.uint8),
    "python-int": 7,
    "python-bool": True,
    "e8m0": jnp.array([1, 2, 4]).astype(jnp.float8_e8m0fnu),
}


def clip(tx, tree):
    return tx.update(tree, tx.init(tree))[0]


@every
def test_other_leaves_pass_untouched(entry, run):
    """They enter no norm either: the rest becomes what it becomes alone."""
    tree = helpers.gradients()
    # No float0 array goes into jit.
    kinds = [k for k in PASSED if k != "float0" or run is not jax.jit]
    others = {kind: PASSED[kind] for kind in kinds}
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(
        {**tree, "dense": {**tree["dense"], **others}}
    )
    for kind, other in run(lambda t: t)(others).items():
        passed = found["dense"].pop(kind)
        assert type(passed) is type(other)
        if kind == "key":
            passed, other = jax.random.key_data(passed), jax.random.key_data(other)
        assert np.array_equal(np.asarray(passed), np.asarray(other)), kind
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)))


@every
def test_complex_leaves_are_clipped_by_the_modulus(entry, run):
    """Bounds are of it, and it is at least 0; of matrices, those of singular values."""
    sizes, angles = helpers.gradients(), helpers.gradients(1)
    given = jax.tree.map(lambda x, angle: x * jnp.exp(1j * angle), sizes, angles)
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(given)
    helpers.assert_same_types(found, given)
    assert helpers.differs(found, given)
    expected = entry.expected(helpers.as_float64(given))
    helpers.assert_close(found, expected, ulps=4)


@every
def test_python_scalars_come_back_as_jax_makes_them(entry, run):
    """As weakly typed scalars, which have no singular values and no axes."""
    tree = {"dense": 30.0, "out": [40.0, 0.001]}
    clips = run(lambda t: clip(helpers.strict(entry.make()), t))
    if entry.of_matrices:
        helpers.assert_identical(clips(tree), run(lambda t: t)(tree))
    elif entry.kwargs.get("axis"):
        with pytest.raises(
            ValueError, match=r"`axis` must .*\(0,\).*leaf 'dense'.*mask="
        ):
            clips(tree)
    else:
        found = clips(tree)
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, entry.expected(numpy_tree(tree)))


@every
def test_empty_trees_and_leaves_are_taken(entry, run):
    """Trees without leaves, leaves without elements."""
    tx = helpers.strict(entry.make())
    for tree in ({}, [], None, {"dense": {}, "out": []}, {"dense": None}):
        assert clip(tx, tree) == tree
    tree = helpers.gradients()
    expected = entry.expected(numpy_tree(tree))
    assert helpers.differs(expected, tree)
    tree["dense"]["empty"] = jnp.zeros((0, 3))
    found = run(lambda t: clip(tx, t))(tree)
    helpers.assert_identical(found["dense"].pop("empty"), jnp.zeros((0, 3)))
    helpers.assert_close(found, expected)


@pytest.mark.covering(entry=ENTRIES, dtype=helpers.DTYPES, run=RUNS)
def test_a_bare_array_is_a_tree(entry, dtype, run):
    """As the only leaf of a tree, which is what the oracles by top-level key take."""
    x = helpers.typed(dtype)["out"][0]
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(x)
    helpers.assert_same_types(found, x)
    assert helpers.differs(found, x)
    helpers.assert_close(found, entry.expected({"out": numpy_tree(x)})["out"])


@pytest.mark.covering(entry=ENTRIES)
def test_no_leaf_kind_is_dropped_from_a_string(entry):
    tree = helpers.gradients()
    tree["dense"]["label"] = "text"
    tx = entry.make()
    with pytest.raises(TypeError, match=r"'dense/label' must be .*str.*Remove it"):
        tx.init(tree)
    with pytest.raises(TypeError, match=r"'dense/label' must be .*str.*Remove it"):
        tx.update(tree, entry.make().init(helpers.gradients()))
