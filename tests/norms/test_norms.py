"""The norm over magnitudes, dtypes and splits, against exact sums."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from optclip import norms
from optclip.functional import clip_by_global_norm, global_norm
from tests.support import helpers, oracles
from tests.support.covering import RUNS

ORDERS = [0.5, 1.0, 1.5, 2.0, 3.0, math.inf]
# What is promised of the orders 1, 2 and inf, relative; and of all others.
ROOM, WIDE_ROOM = 1e-6, 1e-5


@functools.cache
def norm_of_order(p):
    return jax.jit(helpers.strictly(functools.partial(global_norm, ord=p)))


def measured(tree, p=2.0):
    return float(norm_of_order(p)(tree))


@pytest.mark.parametrize("p", ORDERS)
def test_squares_neither_overflow_nor_vanish(p):
    """From 2**-50 to 2**120: squares neither overflow nor vanish."""
    rng = np.random.default_rng(3)
    for exponent in (-50, -30, 0, 30, 63, 100, 120):
        x = np.ldexp(rng.normal(size=64).astype(np.float32), exponent)
        expected = oracles.norm(x, p)
        if expected > float(np.finfo(np.float32).max):
            assert measured(jnp.asarray(x), p) == np.inf
        else:
            room = ROOM if p in (1, 2, math.inf) else WIDE_ROOM
            assert abs(measured(jnp.asarray(x), p) / expected - 1) <= room


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_op_by_op_is_as_compiled(p):
    """As compiled, also where the squares leave the range."""
    for values in ([3.0, -4.0, 0.0], [3e20, 4e20], [3e-15, 4e-15]):
        found = float(helpers.strictly(global_norm)(jnp.array(values), ord=p))
        expected = oracles.norm(np.float64(values), p)
        assert abs(found / expected - 1) <= WIDE_ROOM


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (jnp.float16, [300.0, 400.0]),
        (jnp.float16, [1e-4] * 1000),
        (jnp.float16, [6e-8, 6e-8]),
        (jnp.bfloat16, [3e20, 4e20]),
        (jnp.bfloat16, [1.0] * 1000),
        (jnp.float32, [3e20, 4e20]),
        (jnp.float32, [3e-17, 4e-17]),
        (jnp.float32, [1.0] + [2.0**-13] * 2**20),
        (jnp.float32, [2.0**-45] + [2.0**-56] * 2**20),
        (jnp.complex64, [3e20 + 4e20j]),
        (jnp.float8_e5m2, [49152.0, 49152.0]),
    ],
)
def test_norms_that_are_hard_to_sum_are_right(dtype, values):
    x = jnp.asarray(np.array(values), dtype)
    expected = oracles.norm(helpers.as_float64(x))
    assert abs(measured(x) / expected - 1) <= ROOM
    few = list(x[:20])
    assert abs(measured(few) / oracles.norm(helpers.as_float64(x)[:20]) - 1) <= ROOM


def test_leaves_of_mixed_magnitudes_and_dtypes_have_one_norm():
    tree = [jnp.array([300.0], jnp.float16), jnp.array([10.0]), jnp.array([3e30])]
    assert abs(measured(tree) / 3e30 - 1) <= ROOM
    tree = [jnp.array([6e-8], jnp.float16), jnp.array([1e-15]), jnp.array([0.0])]
    expected = oracles.tree_norm(helpers.as_float64(tree))
    assert abs(measured(tree) / expected - 1) <= ROOM


@pytest.mark.covering(
    p=[0.5, 1.0, 2.0, 3.0], policy=["propagate", "zero", "drop"], run=RUNS
)
def test_a_norm_above_the_largest_float_is_not_finite(p, policy, run):
    """It reads inf, whatever the elements are, and the policy decides."""
    x = jnp.full(4096, 3e38)
    clip = run(lambda x: clip_by_global_norm(x, 1.0, ord=p, nonfinite=policy))
    clipped, norm = clip(x)
    assert np.isinf(norm)
    expected = np.nan if policy == "propagate" else 0.0
    np.testing.assert_array_equal(clipped, np.full(4096, expected))


def test_a_mean_is_too_small_as_any_norm():
    (rms,) = norms.measure([norms.Block([jnp.full(2**16, 2.0**-62)])], "rms")
    assert rms == 0
    clipped, norm = clip_by_global_norm(jnp.ones(2), 1.0, use_norm=2.0**-61)
    assert norm == 0
    np.testing.assert_array_equal(clipped, np.ones(2))


@pytest.mark.covering(p=ORDERS, run=RUNS)
def test_what_is_too_small_counts_as_0(p, run):
    """A norm below 2**-60, and such a threshold: it is zeros that are left."""
    clip = run(lambda x, c: clip_by_global_norm(x, c, ord=p))
    for size in (2.0**-70, 2.0**-140):
        x = jnp.full(3, size, jnp.float32)
        for limit, left in ((1.0, x), (2.0**-59, x), (2.0**-61, x * 0)):
            clipped, norm = clip(x, limit)
            assert norm == 0
            helpers.assert_identical(clipped, left)
    clipped, norm = clip(jnp.ones(3), 2.0**-61)
    assert norm > 0
    np.testing.assert_array_equal(clipped, np.zeros(3))


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_the_norm_is_the_same_however_it_is_split(parts):
    """However a vector is split into leaves, the norm is what it is whole."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=5000) * np.exp(rng.normal(size=5000))).astype(np.float32)
    leaves = [jnp.asarray(part) for part in np.array_split(x, parts)]
    for p in (1.0, 2.0, math.inf):
        assert abs(measured(leaves, p) / oracles.norm(x, p) - 1) <= ROOM


def test_means_divide_by_the_count_of_all_leaves():
    block = norms.Block([jnp.array([3.0, 4.0]), jnp.zeros((2, 3))])
    (rms,) = norms.measure([block], "rms")
    (average,) = norms.measure([block], "average")
    np.testing.assert_allclose(rms, 5 / np.sqrt(8), rtol=1e-6)
    np.testing.assert_allclose(average, 5 / 8, rtol=1e-6)


def test_the_norm_of_nothing_is_zero():
    assert global_norm({}) == 0.0
    assert global_norm(jnp.zeros((0,))) == 0.0
    assert global_norm(jnp.zeros((0,)), ord=math.inf) == 0.0
    assert global_norm(jnp.zeros((0,)), ord=3.0) == 0.0
    (found,) = norms.measure([norms.Block([])], "rms")
    assert found == 0.0


@pytest.mark.covering(p=ORDERS, run=RUNS)
def test_derivatives_follow_the_formula(p, run):
    """Against the formula; 0 at zero, split among ties, also complex and second order."""
    x = jnp.array([3.0, -4.0, 0.0, 1.0])
    slope = run(jax.grad(lambda x: global_norm(x, ord=p)))
    n = oracles.norm(x, p)
    if p == math.inf:
        expected = [0, -1, 0, 0]
    else:
        share = np.abs(x / n, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(x == 0, 0, np.sign(x) * share ** (p - 1))
    np.testing.assert_allclose(slope(x), expected, rtol=1e-5)
    np.testing.assert_array_equal(slope(jnp.zeros(4)), np.zeros(4))
    curve = run(jax.hessian(lambda x: global_norm(x, ord=p)))
    assert np.all(np.isfinite(curve(x)))
    assert np.all(np.isfinite(curve(jnp.zeros(4))))
    if p == 2:
        at = jnp.array([3.0, 4.0])
        exact = np.eye(2) / 5 - np.outer(at, at) / 125
        np.testing.assert_allclose(curve(at), exact, rtol=1e-5, atol=1e-7)


def test_derivatives_are_split_among_ties_and_right_at_any_size():
    slope = jax.grad(lambda x: global_norm(x, ord=math.inf))
    np.testing.assert_array_equal(slope(jnp.array([2.0, -2.0, 1.0])), [0.5, -0.5, 0])
    for scale in (1e-15, 1e25):
        found = jax.grad(global_norm)(jnp.array([3.0, 4.0]) * scale)
        np.testing.assert_allclose(found, [0.6, 0.8], rtol=1e-6)


def test_the_derivative_of_a_complex_norm_is_the_conjugate():
    z = jnp.array([3 + 4j, 0j])
    found = jax.grad(global_norm)(z)
    np.testing.assert_allclose(found, np.array([0.6 - 0.8j, 0]), rtol=1e-6)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=1000))
        for p in ORDERS:
            found = global_norm([x, jnp.ones(3, jnp.float16)], ord=p)
            exact = oracles.norm(np.concatenate([np.asarray(x), np.ones(3)]), p)
            assert found.dtype == jnp.float64
            np.testing.assert_allclose(found, exact, rtol=4e-15)
        assert global_norm(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("l1", 7.0), ("l2", 5.0), ("inf", 4.0), ("rms", 12.5**0.5), ("average", 2.5),
        (1, 7.0), (norms.Norm(), 5.0), (norms.Norm(2.0, 0.5), 12.5**0.5),
    ],
)  # fmt: skip
def test_norms_are_what_they_are_called(norm, expected):
    """A norm of no order is L2, one by the root of the count the root mean square."""
    (found,) = norms.measure([norms.Block([jnp.array([3.0, -4.0])])], norm)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_one_element_counts_as_one():
    (found,) = norms.measure([norms.Block([jnp.array([-3.0])])], "rms")
    assert found == 3.0


@pytest.mark.parametrize(
    ("leaves", "axis"),
    [([jnp.ones((2, 3))], (2,)), ([jnp.ones(3)] * 2, (0,)), ([jnp.ones(3)], [0])],
)
def test_axes_that_a_block_cannot_have_are_refused(leaves, axis):
    with pytest.raises((ValueError, TypeError), match=r"`axis` must (be|name)"):
        norms.measure([norms.Block(leaves, axis)])


def test_a_count_to_a_high_power_is_refused():
    with pytest.raises(
        ValueError, match=r"`per_count` must be one number from 0 to 1.*2"
    ):
        norms.Norm(2.0, per_count=2.0)


@pytest.mark.covering(
    ord=(1.0, 2.0, 3.0, np.inf), value=(0.0, 1e-30, 3e-20, 1.0, 1e20, 3e38)
)
def test_norms_of_constants_are_right(ord, value):
    """XLA squares constants factor by factor, if it can: 0 * inf."""
    block = [norms.Block([jnp.full(3, value)])]

    (found,) = jax.jit(lambda: norms.measure(block, ord))()
    with np.errstate(over="ignore"):
        expected = np.float32(float(np.float32(value)) * (3 ** (1 / ord)))
    expected = expected if expected >= 2.0**-60 else 0.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_large_float16_do_not_overflow(axis):
    x = (100 * np.random.default_rng(5).normal(size=(300, 1000))).astype(np.float16)
    found = optclip.functional.clip_by_norm(jnp.asarray(x), 0.5, axis=axis)
    size = np.sqrt(np.sum(x.astype(np.float64) ** 2, axis=axis, keepdims=True))
    assert np.all(size > 0.5)
    np.testing.assert_allclose(found, x * 0.5 / size, rtol=1e-3, atol=3e-8)


def test_a_norm_bends_by_one_over_itself_at_zeros():
    """A zero beside other elements is no kink of the L2 norm: it bends by 1 / norm."""
    tree = {"a": jnp.array([3.0, 4.0, 0.0]), "b": jnp.zeros(1)}
    curve = helpers.quick_jit(jax.hessian(F.global_norm))(tree)
    exact = np.eye(3) / 5 - np.outer([3, 4, 0], [3, 4, 0]) / 125
    np.testing.assert_allclose(curve["a"]["a"], exact, atol=1e-7)
    np.testing.assert_allclose(curve["b"]["b"], [[0.2]], rtol=1e-6)
    np.testing.assert_array_equal(curve["a"]["b"], np.zeros((3, 1)))
