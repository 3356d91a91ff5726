"""Every transformation against its formula, and what thresholds mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import covering, helpers
from tests.support.helpers import quick_jit
from tests.support.registry import ENTRIES, SCALAR, numpy_tree

ALL_KINDS = (*helpers.DTYPES, "mixed")


def clip(tx, tree, params=None, **extra):
    updates, _ = tx.update(tree, tx.init(tree), params, **extra)
    return updates


def at(entry, run=quick_jit):
    """A clip of a tree at a threshold, both of them arguments."""
    return run(lambda tree, c: clip(helpers.strict(entry.make(c)), tree))


@pytest.mark.covering(entry=ENTRIES, kind=ALL_KINDS, run=covering.RUNS)
def test_matches_the_formula(entry, kind, run):
    tree = helpers.typed(kind)
    tx = helpers.strict(entry.make())
    found = run(lambda t: clip(tx, t))(tree)
    helpers.assert_same_types(found, tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)), ulps=4)


@pytest.mark.covering(entry=ENTRIES, run=covering.RUNS)
def test_float64_is_clipped_in_float64(entry, run):
    with jax.enable_x64(True):
        tree = helpers.typed("float64")
        tx = helpers.strict(entry.make())
        found = run(lambda t: clip(tx, t))(tree)
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        expected = entry.expected(numpy_tree(tree))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            room = 1e-15 + entry.roundings * 2.0**-52 * np.max(np.abs(b))
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-14, atol=room)


@pytest.mark.covering(
    entry=SCALAR,
    run=covering.RUNS,
    # Its other bound is not infinite.
    where=lambda entry, run: entry.id != "value-two-bounds",
)
def test_infinite_threshold_touches_nothing(entry, run):
    """Not even NaN, inf and subnormals: that is how one logs a norm."""
    tree = {kind: helpers.typed(kind) for kind in helpers.DTYPES}
    for part in tree.values():
        dtype = part["dense"]["bias"].dtype
        part["dense"]["bias"] = jnp.array([jnp.nan, jnp.inf, 1e-40, -0.0], dtype)
    found = run(lambda t: clip(helpers.strict(entry.make(jnp.inf)), t))(tree)
    helpers.assert_identical(found, tree)


@pytest.mark.covering(
    entry=SCALAR,
    kind=helpers.KINDS,
    where=lambda entry, kind: entry.id != "value-two-bounds",
)
def test_zero_threshold_gives_zeros(entry, kind):
    tree = helpers.typed(kind)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    clip_to_zero = quick_jit(lambda t: clip(helpers.strict(entry.make(0.0)), t))
    assert not any(np.any(x) for x in jax.tree.leaves(clip_to_zero(tree)))
    helpers.assert_identical(clip_to_zero(zeros), zeros)


THRESHOLDS = {
    "np.float64": np.float64,
    "np.float32": np.float32,
    "np.ndarray": np.asarray,
    "jnp.float32": jnp.float32,
    "jnp.bfloat16": jnp.bfloat16,
    "schedule": optax.constant_schedule,
    "thresholds.constant": optclip.thresholds.constant,
    "thresholds.schedule": lambda c: optclip.thresholds.schedule(
        lambda step: c + 0.0 * jnp.float32(step)
    ),
}


@pytest.mark.covering(entry=SCALAR, threshold=tuple(THRESHOLDS))
def test_every_kind_of_threshold_is_the_same(entry, threshold):
    """Numbers, NumPy and JAX scalars of any dtype, schedules, rules; bf16 gradients."""
    tree = helpers.typed("bfloat16")
    tx = entry.make(THRESHOLDS[threshold](entry.threshold[1]))
    found = quick_jit(lambda t: clip(helpers.strict(tx), t))(tree)
    assert helpers.differs(found, tree)
    helpers.assert_close(found, entry.expected(numpy_tree(tree)), ulps=4)


@pytest.mark.covering(entry=SCALAR, kind=helpers.KINDS)
def test_schedule_follows_the_step(entry, kind):
    """Half the threshold from the second step on."""
    tree = helpers.typed(kind)
    c = entry.threshold[1]
    tx = entry.make(optax.piecewise_constant_schedule(c, {1: 0.5}))
    state, update = tx.init(tree), quick_jit(tx.update)
    first, state = update(tree, state)
    second, state = update(tree, state)
    helpers.assert_close(first, entry.expected(numpy_tree(tree), c))
    helpers.assert_close(second, entry.expected(numpy_tree(tree), 0.5 * c))
    assert helpers.differs(first, second)


@pytest.mark.covering(entry=SCALAR, kind=helpers.KINDS)
def test_a_threshold_may_be_traced(entry, kind):
    tree = helpers.typed(kind)
    clipped_at = at(entry)
    c = entry.threshold[1]
    for value in (c, 0.5 * c):
        expected = entry.expected(numpy_tree(tree), value)
        helpers.assert_close(clipped_at(tree, value), expected)
        assert helpers.differs(clipped_at(tree, value), tree)
    if entry.id != "value-two-bounds":
        assert not any(np.any(x) for x in jax.tree.leaves(clipped_at(tree, -1.0)))
    poisoned = jax.tree.leaves(clipped_at(tree, jnp.nan))
    assert all(np.all(np.isnan(x)) for x in poisoned)


@pytest.mark.covering(
    entry=ENTRIES,
    kind=helpers.KINDS,
    # Elements are rounded one by one, which can make a singular value larger.
    where=lambda entry, kind: not entry.of_matrices,
)
def test_strict_keeps_below(entry, kind):
    """`strict` leaves a little less, and still clips by the formula."""
    tree = helpers.typed(kind)

    def both(t):
        return clip(entry.make(strict=True), t), clip(entry.make(), t)

    found, plain = quick_jit(both)(tree)
    assert helpers.differs(found, tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        # The guard band, and one rounding towards zero instead of to nearest.
        room = 1.3e-4 + float(jnp.finfo(a.dtype).eps)
        a, b = helpers.as_float64(a), helpers.as_float64(b)
        assert np.all(np.abs(a) <= np.abs(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=room * np.max(np.abs(b)))
