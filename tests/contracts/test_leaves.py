"""Every transformation on leaves that pass, scalars, empty trees and bare arrays.

All kinds of leaf that are clipped are in test_leaf_kinds.py, all dtypes of gradients in
test_values.py. The other gradients here are float32, since what passes does not depend
on the dtype of the leaf beside it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import covering, helpers
from tests.support.registry import ENTRIES, numpy_tree

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
TREE = helpers.gradients()
EMPTY = jax.device_put(np.zeros((0, 3), np.float32))
ANGLES = helpers.as_float64(helpers.gradients(1))
COMPLEX = jax.tree.map(
    lambda x, angle: jax.device_put(np.complex64(x * np.exp(1j * angle))), TREE, ANGLES
)
SCALARS = {"dense": 30.0, "out": [40.0, 0.0625]}
BARE = helpers.typed("float16")["out"][0]


def clip(tx, tree):
    return tx.update(tree, tx.init(tree))[0]


@pytest.mark.covering(
    entry=ENTRIES,
    run=covering.RUNS,
    # test_leaf_kinds.py runs every scope eagerly, but for the kinds of leaf below that
    # are no arguments of a compiled function.
    where=lambda entry, run: (
        covering.full or run == "jit" or entry.id in ("value", "global-norm")
    ),
)
def test_leaf_that_is_not_clipped_passes_and_enters_no_norm(entry, run):
    """Scalars have no singular values; complex leaves are clipped by their modulus."""
    tx, is_compiled = helpers.strict(entry.make()), run is helpers.optimized_jit
    # No float0 array is an argument of a compiled function.
    others = {k: x for k, x in PASSED.items() if k != "float0" or not is_compiled}
    # An eager run compiles each operation in each dtype and shape.
    many = is_compiled or covering.full
    dense = TREE["dense"] if many else {}
    clipped = {"dense": dense, "out": TREE["out"]}
    trees = {"passed": {**clipped, "dense": {**dense, **others, "empty": EMPTY}}}
    if many:
        trees |= {"complex": COMPLEX, "bare": BARE}
    if not entry.kwargs.get("axis"):
        trees["scalars"] = SCALARS
    compiled = helpers.quick_jit if is_compiled else run
    clips = compiled(lambda trees: {key: clip(tx, tree) for key, tree in trees.items()})
    found = clips(trees)
    helpers.assert_identical(found["passed"]["dense"].pop("empty"), EMPTY)
    check_passed(found["passed"]["dense"], compiled(lambda t: t)(others))
    assert helpers.differs(found["passed"], clipped)
    helpers.assert_close(found["passed"], entry.expected(numpy_tree(clipped)))
    check_scalars(entry, found.get("scalars"))
    if "complex" in trees:
        check_complex_and_bare(entry, found["complex"], found["bare"])


def check_complex_and_bare(entry, turned, bare):
    helpers.assert_same_types((turned, bare), (COMPLEX, BARE))
    assert helpers.differs(turned, COMPLEX)
    assert helpers.differs(bare, BARE)
    expected = entry.expected(helpers.as_float64(COMPLEX))
    helpers.assert_close(turned, expected, ulps=4)
    expected = entry.expected({"out": numpy_tree(BARE)})["out"]
    helpers.assert_close(bare, expected)


def check_passed(found, others):
    """Each of the other leaves is as it was; takes them out of the tree."""
    for kind, other in others.items():
        passed = found.pop(kind)
        assert type(passed) is type(other)
        if kind == "key":
            passed, other = jax.random.key_data(passed), jax.random.key_data(other)
        assert np.array_equal(np.asarray(passed), np.asarray(other)), kind


def check_scalars(entry, found):
    """Python scalars become weakly typed ones, which have no axes."""
    if found is None:
        words = r"`axis` must .*\(0,\).*leaf 'dense'.*mask="
        with pytest.raises(ValueError, match=words):
            clip(entry.make(), SCALARS)
        return
    helpers.assert_same_types(found, SCALARS)
    assert helpers.differs(found, SCALARS) == (not entry.of_matrices)
    wide = numpy_tree(SCALARS)
    helpers.assert_close(found, wide if entry.of_matrices else entry.expected(wide))


@pytest.mark.covering(entry=ENTRIES)
def test_tree_without_arrays_is_returned_and_string_is_named(entry):
    tx = helpers.strict(entry.make())
    for tree in ({}, [], None, {"dense": {}, "out": []}, {"dense": None}):
        assert clip(tx, tree) == tree
    tree = {**TREE, "dense": {**TREE["dense"], "label": "text"}}
    for call in (tx.init, lambda tree: tx.update(tree, tx.init(TREE))):
        with pytest.raises(TypeError, match=r"'dense/label' must be .*str.*Remove it"):
            call(tree)
