"""Every transformation against its formula, and what thresholds mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests import helpers
from tests.registry import ENTRIES, SCALAR, numpy_tree

every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
scalar = pytest.mark.parametrize("entry", SCALAR, ids=lambda e: e.id)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def clip(tx, tree, params=None, **extra):
    updates, _ = tx.update(tree, tx.init(tree), params, **extra)
    return updates


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_matches_the_formula(entry, dtype, run):
    tree = helpers.gradients(dtype=dtype)
    tx = helpers.strict(entry.make())
    found = run(lambda t: clip(tx, t))(tree)
    helpers.assert_same_types(found, tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)), ulps=4)


@every
def test_mixed_dtypes(entry, run):
    tree = helpers.mixed_gradients()
    tx = helpers.strict(entry.make())
    found = run(lambda t: clip(tx, t))(tree)
    helpers.assert_same_types(found, tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)), ulps=4)


@every
def test_float64(entry, run):
    with jax.enable_x64(True):
        tree = helpers.gradients(dtype=jnp.float64)
        tx = helpers.strict(entry.make())
        found = run(lambda t: clip(tx, t))(tree)
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        expected = entry.expected(numpy_tree(tree))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-14, atol=1e-15)


@scalar
def test_infinite_threshold_touches_nothing(entry, run):
    """Not even NaN, inf and subnormals: that is how one logs a norm."""
    if entry.id == "value-two-bounds":
        return  # Its other bound is at work.
    tree = {dtype.__name__: helpers.gradients(dtype=dtype) for dtype in DTYPES}
    for part in tree.values():
        dtype = part["dense"]["bias"].dtype
        part["dense"]["bias"] = jnp.array([jnp.nan, jnp.inf, 1e-40, -0.0], dtype)
    found = run(lambda t: clip(helpers.strict(entry.make(jnp.inf)), t))(tree)
    helpers.assert_identical(found, tree)


@scalar
def test_zero_threshold_gives_zeros(entry, run):
    if entry.id == "value-two-bounds":
        entry = ENTRIES[0]
    tree = helpers.gradients()
    found = run(lambda t: clip(helpers.strict(entry.make(0.0)), t))(tree)
    assert not any(np.any(x) for x in jax.tree.leaves(found))
    zeros = jax.tree.map(jnp.zeros_like, tree)
    helpers.assert_identical(clip(entry.make(0.0), zeros), zeros)


@scalar
def test_every_kind_of_threshold_is_the_same(entry):
    """Numbers, NumPy and JAX scalars of any dtype, schedules, rules; bf16 gradients."""
    tree = helpers.gradients(dtype=jnp.bfloat16)
    c = entry.threshold[1]
    expected = clip(entry.make(), tree)
    assert helpers.differs(expected, tree)
    kinds = [
        np.float64(c),
        np.float32(c),
        jnp.float32(c),
        jnp.bfloat16(c),
        np.asarray(c),
        optax.constant_schedule(c),
        optclip.thresholds.constant(c),
        optclip.thresholds.schedule(lambda step: c + 0.0 * jnp.float32(step)),
    ]
    for kind in kinds:
        helpers.assert_close(clip(helpers.strict(entry.make(kind)), tree), expected, 0)


@scalar
def test_schedule_follows_the_step(entry):
    """Half the threshold from the second step on."""
    tree = helpers.gradients()
    c = entry.threshold[1]
    tx = entry.make(optax.piecewise_constant_schedule(c, {1: 0.5}))
    state = tx.init(tree)
    first, state = tx.update(tree, state)
    second, state = tx.update(tree, state)
    helpers.assert_close(first, entry.expected(numpy_tree(tree), c))
    helpers.assert_close(second, entry.expected(numpy_tree(tree), 0.5 * c))
    assert helpers.differs(first, second)


@scalar
def test_traced_threshold(entry):
    tree = helpers.gradients()

    @jax.jit
    def clipped_at(c):
        return clip(helpers.strict(entry.make(c)), tree)

    c = entry.threshold[1]
    for value in (c, 0.5 * c):
        expected = entry.expected(numpy_tree(tree), value)
        helpers.assert_close(clipped_at(value), expected)
    if entry.id != "value-two-bounds":
        assert not any(np.any(x) for x in jax.tree.leaves(clipped_at(-1.0)))
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(clipped_at(jnp.nan)))


@scalar
@pytest.mark.parametrize(
    "bad", [-1.0, float("nan"), np.float32(-2), jnp.float32(-3), jnp.array(jnp.nan)]
)
def test_bad_threshold_is_refused_by_name(entry, bad):
    name = entry.threshold[0]
    if name == "upper" and not np.isnan(bad):
        return  # An upper bound may be negative.
    with pytest.raises(ValueError, match=f"{name}.*(negative|NaN).*Give"):
        entry.make(bad)


@scalar
@pytest.mark.parametrize("bad", ["1.0", object(), b"1", 1j])
def test_wrong_kind_of_threshold_is_refused_by_name(entry, bad):
    with pytest.raises(TypeError, match=f"{entry.threshold[0]}.*[Gg]ive a"):
        entry.make(bad)


@every
def test_strict_and_eps_keep_below(entry):
    """`strict` leaves a little less, `eps` too; both still clip by the formula."""
    tree = helpers.gradients()
    plain = clip(entry.make(), tree)
    found = clip(entry.make(strict=True), tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, plain, ulps=4096)
    sizes = zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True)
    assert all(np.all(np.abs(a) <= np.abs(b)) for a, b in sizes)
