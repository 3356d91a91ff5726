"""Ghost norms where squares overflow, vanish or cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import norms
from optclip.per_example._ghost import _formulas
from optclip.per_example._ghost._choice import choice_of
from tests.support import per_example_oracle
from tests.support.per_example_oracle import scaled_squares

T, K, P = 3, 32, 8


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def loss(p, example):
    """Its gradients by the matrix are `x^T d`, by the bias and the rows sums of `d`."""
    x, d, ids = example
    return jnp.sum((x @ p["w"] + p["b"] + p["rows"][ids]) * d)


PARAMS = {
    "w": jnp.zeros((K, P), jnp.float32),
    "b": jnp.zeros(P, jnp.float32),
    "rows": jnp.zeros((9, P), jnp.float32),
}


def batch(x, d):
    arrays = [np.asarray(each, np.float32)[None] for each in (x, d)]
    return *arrays, np.array([[1, 1, 2]])


def scaled_norms(examples):
    """Of each leaf: of the bias, the rows, the matrix."""
    _, _, found = jax.jit(lambda p, e: scaled_squares(loss, p, e))(PARAMS, examples)
    assert found["w"].square.dtype == jnp.float32
    return [np.float64(found[name].norm()) for name in ("b", "rows", "w")]


SIZES = [(1, 1), (1e-25, 1e15), (1e25, 1e-20), (1e10, 1e20), (1e-12, 1e-6), (1, 1e30)]


@pytest.mark.parametrize(("of_x", "of_d"), SIZES)
def test_large_and_small(of_x, of_d):
    examples = batch(normal(T, K) * of_x, normal(T, P, seed=1) * of_d)
    _, expected = per_example_oracle.norms(loss, PARAMS, examples)
    for one, right in zip(scaled_norms(examples), expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)


@pytest.mark.parametrize(
    ("of_x", "of_d"), [*SIZES, (1e20, 1e20), (1e-20, 1e-20), (1e-30, 1e20)]
)
def test_norms_are_right_or_inf_or_count_as_0(of_x, of_d):
    examples = batch(normal(T, K) * of_x, normal(T, P, seed=1) * of_d)
    _, expected = per_example_oracle.norms(loss, PARAMS, examples)
    _, found = jax.jit(norms(loss, method="ghost", over="leaf"))(PARAMS, examples)
    for one, right in zip(jax.tree.leaves(found), expected, strict=True):
        if right < 2.0**-60:
            assert one == 0
        elif right < np.finfo(np.float32).max:
            np.testing.assert_allclose(one, right, rtol=1e-6)
        else:
            assert one == np.inf


def test_a_position_whose_activation_is_zero_does_not_hide_the_others():
    """Squares of its cotangent alone overflow, and it has no part in the gradient."""
    x, d = normal(T, K), normal(T, P, seed=1)
    x[0], d[0] = 0, 1e30
    x[1], d[1] = 1e-20 * x[1], 1e20 * d[1]
    d[2] = 0
    x[2] *= 1e30
    examples = batch(x, d)
    _, expected = per_example_oracle.norms(loss, PARAMS, examples)
    found = scaled_norms(examples)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_stays_so(bad, place):
    arrays = [normal(T, K), normal(T, P, seed=1)]
    arrays[place][1, 2] = bad
    found = scaled_norms(batch(*arrays))
    assert not np.isfinite(found[2]).any()
    assert np.isfinite(found[0]).all() == (place == 0)


def test_leaves_together():
    """A leaf that is nothing beside another, and one that is nothing."""
    parts = [(4.0, 60), (9.0, 40), (0.0, 0), (25.0, 60)]
    many = _formulas.Scaled(*(jnp.asarray(x)[None] for x in zip(*parts, strict=True)))
    many = _formulas.Scaled.of(*many)
    np.testing.assert_allclose(many.summed().norm(), [29**0.5 * 2.0**60], rtol=1e-6)


def test_zeros():
    found = scaled_norms(batch(np.zeros((T, K)), np.zeros((T, P))))
    np.testing.assert_array_equal(found, np.zeros((3, 1)))


@pytest.mark.parametrize("rest", [0, 1e-6, 1e-4, 1e-2, 0.1, 0.5])
def test_positions_that_cancel(rest):
    """As right as the gradient is in float32; products would keep half of the digits."""
    x, d = normal(T, K), normal(T, P, seed=1)
    x[1], d[1] = x[0] + rest * x[1], -d[0]
    d[2] *= rest
    examples = batch(x, d)
    assert choice_of(loss, PARAMS, [x[0] for x in examples]).kinds["w"] == "gram"
    _, expected = per_example_oracle.norms(loss, PARAMS, examples)
    found = scaled_norms(examples)
    least = 1e-7 * np.linalg.norm(x) * np.linalg.norm(d)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-6, atol=least)


def test_positions_that_cancel_in_part():
    """Smaller than either of them, but not so much that digits are lost."""
    x, d = np.zeros((T, K)), np.zeros((T, P))
    x[:2, 0], d[:2, 0] = 1, (1, -0.6)
    np.testing.assert_allclose(scaled_norms(batch(x, d))[2], [0.4], rtol=1e-6)


def test_shifts_are_exact():
    x = jnp.asarray([1.5, -1.25, 0, jnp.inf], jnp.float32)
    for exponent in (0, 1, -1, 100, -100, 126, -126):
        by = jnp.full(4, exponent)
        np.testing.assert_array_equal(
            np.float64(_formulas.shifted(x, by)), np.ldexp(np.float64(x), exponent)
        )
    one, least = jnp.float32(1.5), jnp.float32(2.0**-120)
    assert _formulas.shifted(one, jnp.int32(5000)) == jnp.inf
    assert _formulas.shifted(one, jnp.int32(-5000)) == 0
    assert _formulas.shifted(least, jnp.int32(240)) == 1.5 / 1.5 * 2.0**120


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_by_itself(dtype):
    for size in (0, 1, 5, 5000):
        x = jnp.asarray(normal(size), dtype)
        found = _formulas.of_gradient(x)
        right = np.sum(np.square(np.float64(x)))
        np.testing.assert_allclose(
            np.float64(found.square) * 4.0 ** np.float64(found.exponent),
            right,
            rtol=1e-6,
        )
