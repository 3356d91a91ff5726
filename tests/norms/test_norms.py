"""Norms over magnitudes and dtypes, against exact sums."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import norms
from optclip.functional import clip_by_global_norm, global_norm
from tests.support import helpers, oracles

ORDERS = [0.5, 1.0, 1.5, 2.0, 3.0, math.inf]
orders = pytest.mark.parametrize("p", ORDERS)


def measure(leaves, norm):
    (value,) = norms.measure([norms.Block(leaves)], norm)
    return value


def test_means_and_given_norms_below_smallest_norm_are_zero():
    assert measure([np.full(2**16, 2.0**-62, np.float32)], "rms") == 0
    ones = np.float32([1.0, 1.0])
    for given in (2.0**-61, 0):
        clipped, norm = clip_by_global_norm(ones, 1.0, use_norm=given)
        assert norm == 0
        np.testing.assert_array_equal(clipped, ones)


@orders
def test_norms_and_thresholds_below_smallest_norm_are_zero(p):
    """The smallest norm is 2**-60."""
    clip = helpers.quick_jit(lambda x, c: clip_by_global_norm(x, c, ord=p))
    for size in (2.0**-70, 2.0**-140):
        x = np.full(3, size, np.float32)
        for limit, left in ((1.0, x), (2.0**-59, x), (2.0**-61, x * 0)):
            clipped, norm = clip(x, limit)
            assert norm == 0
            helpers.assert_identical(clipped, left)
    clipped, norm = clip(np.ones(3, np.float32), 2.0**-61)
    assert norm > 0
    np.testing.assert_array_equal(clipped, np.zeros(3))


TWO = [np.float32([3.0, 4.0]), np.zeros((2, 3), np.float32)]
EMPTY = [np.zeros(0, np.float32)]


@pytest.mark.parametrize(
    ("leaves", "norm", "expected"),
    [
        *(
            ([np.float32([3.0, -4.0])], norm, expected)
            for norm, expected in (
                *(("l1", 7.0), ("l2", 5.0), ("inf", 4.0), ("rms", 12.5**0.5)),
                *(("average", 2.5), (1, 7.0), (norms.Norm(), 5.0)),
                (norms.Norm(2.0, 0.5), 12.5**0.5),
            )
        ),
        # Means divide by the count of all leaves.
        *((TWO, "rms", 5 / np.sqrt(8)), (TWO, "average", 5 / 8)),
        ([np.float32([-3.0])], "rms", 3.0),
        # The norm of an empty tree is zero.
        *(([], "rms", 0.0), *((EMPTY, p, 0.0) for p in (2.0, 3.0, math.inf))),
    ],
)
def test_named_norms_match_definition(leaves, norm, expected):
    np.testing.assert_allclose(measure(leaves, norm), expected, rtol=1e-6)


@orders
def test_derivatives_of_global_norm_match_formula(p):
    """0 at zero; the second derivative is finite."""
    x = np.float32([3.0, -4.0, 0.0, 1.0])
    norm = functools.partial(global_norm, ord=p)
    derivatives = helpers.quick_jit(lambda x: (jax.grad(norm)(x), jax.hessian(norm)(x)))
    fraction = np.abs(x / oracles.norm(x, p), dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(x == 0, 0, np.sign(x) * fraction ** (p - 1))
    slope, curve = derivatives(x)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
    assert np.all(np.isfinite(curve))
    slope, curve = derivatives(0 * x)
    np.testing.assert_array_equal(slope, np.zeros(4))
    assert np.all(np.isfinite(curve))


def test_derivative_of_maximum_is_split_among_ties():
    slope = helpers.quick_jit(jax.grad(lambda x: global_norm(x, ord=math.inf)))
    np.testing.assert_array_equal(slope(np.float32([2.0, -2.0, 1.0])), [0.5, -0.5, 0])


def test_norm_is_float64_only_for_float64_leaves():
    with jax.enable_x64(True):
        assert global_norm([jnp.ones(3), jnp.ones(3, jnp.float16)]).dtype == jnp.float64
        assert global_norm(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("ord", [2.0, 3.0])
def test_norm_of_constants_is_accurate(ord):
    """XLA would square the factors of a constant one by one: 0 * inf."""
    values = (0.0, 1e-30, 3e-20, 1.0, 1e20, 3e38)
    norm = helpers.optimized_jit(
        lambda: [measure([jnp.full(3, value)], ord) for value in values]
    )
    with np.errstate(over="ignore"):
        expected = np.float32(np.float64(np.float32(values)) * 3 ** (1 / ord))
    expected[expected < 2.0**-60] = 0.0
    np.testing.assert_allclose(norm(), expected, rtol=1e-6)


def test_norm_measures_blocks_of_plain_arrays():
    block = norms.Block([jnp.array([3.0, 4.0])])
    for norm in (norms.Norm(2.0), norms.Spectral()):
        (found,) = norm.measure([block]).norms.entries()
        np.testing.assert_allclose(found, 5.0, rtol=1e-6)


def test_norm_of_array_as_power_of_count_is_rejected():
    with pytest.raises(TypeError, match="`per_count` must be a Python or NumPy number"):
        norms.Norm(2.0, jnp.float32(0.5))
