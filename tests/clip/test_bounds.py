"""Clipping of elements to bounds: of any shape, crossing, complex."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers


def test_bounds_broadcast_and_may_be_trees_with_none():
    x = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    lower = {"a": np.float32([2.0, 2, 2]), "b": None}
    upper = {"a": x - 0.5, "b": 3.0}
    clip = helpers.without_promotion(
        lambda t: F.clip_by_value(t, lower=lower, upper=upper)
    )
    clipped = clip({"a": x, "b": {"c": x, "d": x}})
    np.testing.assert_array_equal(clipped["a"], np.maximum(np.minimum(x, x - 0.5), 2))
    np.testing.assert_array_equal(clipped["b"]["d"], np.minimum(x, 3))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"upper": 1.0}, [-9, 1]),
        ({"upper": np.full(2, 1, np.longdouble)}, [-9, 1]),
        ({"lower": np.longdouble(-2), "upper": np.int64(2**40)}, [-2, 9]),
        ({"lower": -1.0}, [-1, 9]),
        # As in TensorFlow, bounds that cross give the lower one.
        ({"lower": jnp.array([3.0]), "upper": jnp.array([1.0])}, [3, 3]),
    ],
)
def test_side_without_bound_is_unclipped_and_lower_bound_comes_first(bounds, expected):
    tx, x = optclip.clip_by_value(**bounds), np.float32([-9.0, 9.0])
    np.testing.assert_array_equal(tx.update(x, tx.init(x))[0], expected)
    np.testing.assert_array_equal(F.clip_by_value(x, **bounds), expected)


def test_schedule_of_lower_bounds_may_leave_leaf_unbounded():
    tx = optclip.clip_by_value(lower=lambda step: {"a": -1.0, "b": None})
    tree = {"a": np.float32([-9, 9]), "b": np.float32([-9, 9])}
    clipped, _ = tx.update(tree, tx.init(tree))
    np.testing.assert_array_equal(clipped["a"], [-1, 9])
    np.testing.assert_array_equal(clipped["b"], tree["b"])


def test_derivative_by_bounds_matches_tensorflow():
    """With respect to x inside, to the bound outside, and to `lower` if they cross."""
    x = np.float32([1.0, 2.0, 3.0, 4.0])

    def total(x, lower, upper):
        weights = np.float32([1, 2, 4, 8])
        return jnp.sum(F.clip_by_value(x, lower=lower, upper=upper) * weights)

    slope = helpers.quick_jit(jax.grad(total, (0, 1, 2)))
    by_x, by_lower, by_upper = slope(x, np.full_like(x, 2.0), np.full_like(x, 3.0))
    np.testing.assert_array_equal(by_x, [0, 2, 4, 0])
    np.testing.assert_array_equal(by_lower, [1, 0, 0, 0])
    np.testing.assert_array_equal(by_upper, [0, 0, 0, 8])


def test_complex_values_are_clipped_by_modulus(run):
    """Infinite elements are clipped to the bound in their direction."""
    x = [3 + 4j, 0.3 + 0.4j, 0j, 3e38 + 3e38j]
    x += [complex(np.inf, 1), complex(np.inf, -np.inf)]
    clip = run(lambda x: F.clip_by_value(x, lower=-1.0, upper=1.0))
    root = np.sqrt(0.5)
    expected = [0.6 + 0.8j, 0.3 + 0.4j, 0, root + root * 1j, 1, root - root * 1j]
    np.testing.assert_allclose(clip(np.array(x, np.complex64)), expected, rtol=1e-6)


def test_complex_values_with_bounds_of_one_sign():
    """Small moduli grow to a positive lower bound; no modulus is below 0."""
    x = np.complex64([3 + 4j, 0.3 + 0.4j, 0, 12])
    grown = F.clip_by_value(x, lower=1.0, upper=10.0)
    np.testing.assert_allclose(grown, [3 + 4j, 0.6 + 0.8j, 0, 10], rtol=1e-6)
    traced = helpers.quick_jit(lambda upper: F.clip_by_value(x, -8.0, upper))
    np.testing.assert_array_equal(traced(-7.0), np.zeros(4))
    ends = optclip.clip_by_value(lower=-8.0, upper=lambda step: 1.0 - 1.0000002 * step)
    for update in (ends.update, helpers.quick_jit(ends.update)):
        _, state = update(x, ends.init(x))
        np.testing.assert_array_equal(update(x, state)[0], np.zeros(4))
    for upper in (-7.0, np.float32([1, 1, 1, -7])):
        tx = optclip.clip_by_value(lower=-8.0, upper=upper)
        with pytest.raises(ValueError, match=r"`upper` must be .* real and imaginary"):
            jax.eval_shape(tx.update, x, tx.init(x))


def test_strict_complex_bound_is_never_exceeded():
    z = (np.random.default_rng(0).normal(size=(5000, 2)) @ [3, 3j]).astype(np.complex64)
    clip = helpers.optimized_jit(
        lambda z: F.clip_by_value(z, lower=-1.0, upper=1.0, strict=True)
    )
    sizes = np.abs(helpers.as_float64(clip(z)))
    assert np.all(sizes <= 1)
    assert np.sum(sizes > 0.999) > 3000


@pytest.mark.parametrize("p", [2.0, 3.0, np.inf])
def test_modulus_above_largest_float_has_infinite_norm(p):
    x = np.array([3e38 + 3e38j, 1.0], np.complex64)
    clipped, norm = helpers.quick_jit(lambda x: F.clip_by_global_norm(x, 1.0, ord=p))(x)
    assert norm == np.inf
    assert np.all(np.isnan(clipped))


@pytest.mark.parametrize("limit", [np.uint8(2), np.int64(2**40), 2**40, 1e300, 0.1])
def test_limit_is_symmetric(limit):
    """For any negative of its type, and any rounding."""
    x = np.float32([-np.inf, -3.0, -1.0, 1.0, 3.0, np.inf])
    clipped = helpers.quick_jit(lambda x: F.clip_by_value(x, limit, strict=True))(x)
    np.testing.assert_array_equal(clipped, -clipped[::-1])
    assert np.max(np.abs(np.float64(clipped))) <= float(limit)
    largest = min(float(limit), float(np.finfo(np.float32).max))
    expected = np.clip(np.float64(x), -largest, largest)
    np.testing.assert_allclose(clipped, expected, rtol=1.2e-7)


def test_scalar_leaf_records_the_bound_of_its_side():
    tx = optclip.clip_by_value(lower=-1.0, upper=2.0)
    tree = {"scalar": np.float32(-4), "x": np.float32([0.5, 3])}
    out, state = tx.update(tree, tx.init(tree))
    assert out["scalar"] == -1
    logged = optclip.metrics(state)
    assert (logged["clip/norm"], logged["clip/threshold"]) == (4, 1)
    np.testing.assert_allclose(logged["clip/fraction"], 2 / 3, rtol=1e-6)
