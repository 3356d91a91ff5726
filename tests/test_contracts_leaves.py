"""Every transformation on every kind of leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

from tests import helpers
from tests.registry import ENTRIES, numpy_tree

every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)

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
# All of jax.numpy's but float8_e8m0fnu (no zero, no sign), float64 (needs x64) and the
# six-bit formats, which XLA cannot compute with yet.
FLOATS = [
    "bfloat16",
    "float16",
    "float32",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
]


def test_no_float_format_is_forgotten():
    left_out = {"float_", "floating", "float8_e8m0fnu", "float64", "float_power"}
    left_out |= {"float6_e2m3fn", "float6_e3m2fn"}
    known = {n for n in dir(jnp) if n.startswith(("float", "bfloat"))}
    assert known - left_out == set(FLOATS)


def clip(tx, tree):
    return tx.update(tree, tx.init(tree))[0]


@every
def test_other_leaves_pass_untouched(entry, run):
    """They enter no norm either: the rest becomes what it becomes alone."""
    tree = helpers.gradients()
    alone = clip(entry.make(), tree)
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
    helpers.assert_close(found, alone, ulps=2)


@every
def test_none_and_masked_nodes_stay(entry, run):
    tree = helpers.gradients()
    alone = clip(entry.make(), tree)
    tree["dense"]["none"] = None
    tree["out"].append(optax.MaskedNode())
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(tree)
    assert found["dense"].pop("none") is None
    assert isinstance(found["out"].pop(), optax.MaskedNode)
    helpers.assert_close(found, alone, ulps=2)


@every
def test_every_float_format(entry):
    """Each float format with a zero and a sign, four bits and up, in one tree."""
    exact = jnp.array([[-2.0, 1.0, 0.0, 1.5], [2.0, -0.5, 1.0, 2.0]])
    many = jnp.tile(exact, (8, 1))
    tree = {
        "dense": {name: many.astype(getattr(jnp, name)) for name in FLOATS},
        "out": [many],
    }
    assert len(FLOATS) >= 10
    # Low enough to clip every leaf by every norm.
    c = 0.05 * entry.threshold[1] if entry.scalar_threshold else None
    found = jax.jit(lambda t: clip(helpers.strict(entry.make(c)), t))(tree)
    helpers.assert_same_types(found, tree)
    expected = entry.expected(numpy_tree(tree), c)
    for name in FLOATS:
        dtype = getattr(jnp, name)
        middle = np.asarray(expected["dense"][name], np.float64)
        got = np.asarray(found["dense"][name].astype(jnp.float32), np.float64)
        assert not np.array_equal(got, np.asarray(many, np.float64)), name
        # Rounded to nearest after an error of a few float32 ULP.
        finfo = jnp.finfo(dtype)
        step = float(finfo.eps) * np.maximum(np.abs(middle), float(finfo.tiny))
        slack = 0.5 * step + 4 * 2.0**-23 * np.abs(middle)
        assert np.all(np.abs(got - middle) <= slack), name


@every
def test_complex(entry, run):
    """By the modulus: a complex leaf is clipped as the reals of its moduli are."""
    tree = helpers.gradients()
    turn = np.exp(0.7j).astype(np.complex64)
    if entry.id == "value-two-bounds":
        return  # Tested in test_functional: bounds on a modulus are not symmetric.
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(
        jax.tree.map(lambda x: x * turn, tree)
    )
    expected = jax.tree.map(lambda x: x * turn, entry.expected(numpy_tree(tree)))
    assert all(x.dtype == jnp.complex64 for x in jax.tree.leaves(found))
    helpers.assert_close(found, expected, ulps=4)


@every
def test_python_scalars(entry):
    """They come back as weakly typed scalars, as jax makes of them."""
    if entry.kwargs.get("axis"):
        return  # A scalar has no axis: tested in test_scopes.
    tree = {"dense": 30.0, "out": [40.0, 0.001]}
    found = clip(helpers.strict(entry.make()), tree)
    helpers.assert_same_types(found, tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)))


@every
def test_empty(entry, run):
    """Trees without leaves, leaves without elements."""
    tx = helpers.strict(entry.make())
    for tree in ({}, [], None, {"dense": {}, "out": []}, {"dense": None}):
        assert clip(tx, tree) == tree
    tree = helpers.gradients()
    expected = clip(entry.make(), tree)
    tree["dense"]["empty"] = jnp.zeros((0, 3))
    found = run(lambda t: clip(tx, t))(tree)
    helpers.assert_identical(found["dense"].pop("empty"), jnp.zeros((0, 3)))
    helpers.assert_close(found, expected, ulps=2)


@every
def test_bare_array(entry, run):
    if entry.factory.__name__ == "clip_by_group_norm" or entry.id == "user-scope":
        return  # Their oracles read the top-level keys of a dict.
    x = helpers.gradients()["out"][0]
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(x)
    assert helpers.differs(found, x)
    helpers.assert_close(found, entry.expected(numpy_tree(x)))


@every
@pytest.mark.parametrize("unique", [True, False], ids=["unique", "duplicates"])
def test_sparse(entry, unique, run):
    """A BCOO leaf is clipped as the dense gradient that it stands for."""
    rng = np.random.default_rng(4)
    data = jnp.asarray(rng.normal(size=(5, 4)) * 3.0, jnp.float32)
    rows = [[1], [4], [0], [6], [2]] if unique else [[1], [4], [1], [9], [4]]
    mat = BCOO((data, jnp.array(rows)), shape=(7, 4), unique_indices=unique)
    tree = {"dense": helpers.gradients()["dense"], "out": [mat]}
    dense = {"dense": tree["dense"], "out": [mat.todense()]}
    found = run(lambda t: clip(helpers.strict(entry.make()), t))(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    found["out"][0] = found["out"][0].todense()
    assert helpers.differs(found, dense)
    helpers.assert_close(found, entry.expected(numpy_tree(dense)))


@every
def test_no_leaf_kind_is_dropped_from_a_string(entry):
    tree = helpers.gradients()
    tree["dense"]["label"] = "text"
    tx = entry.make()
    with pytest.raises(TypeError, match=r"'dense/label' is a str.*Remove it"):
        tx.init(tree)
    with pytest.raises(TypeError, match=r"'dense/label' is a str.*Remove it"):
        tx.update(tree, entry.make().init(helpers.gradients()))
