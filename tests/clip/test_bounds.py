"""Elements between bounds: of any shape, crossing, complex."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers


def test_bounds_may_broadcast_be_trees_or_none():
    x = jnp.arange(6.0).reshape(2, 3) + 1
    found = helpers.strictly(
        lambda x: F.clip_by_value(x, lower=jnp.array([2.0, 2, 2]), upper=x - 0.5)
    )(x)
    np.testing.assert_array_equal(found, np.maximum(np.minimum(x, x - 0.5), 2))
    tree = {"a": x, "b": {"c": x, "d": x}}
    found = F.clip_by_value(
        tree, lower={"a": 2.0, "b": None}, upper={"a": None, "b": 3.0}
    )
    np.testing.assert_array_equal(found["a"], np.maximum(x, 2))
    np.testing.assert_array_equal(found["b"]["d"], np.minimum(x, 3))


def test_bounds_that_cross_give_the_lower_one():
    """Arrays that cross give the lower one, as in TensorFlow; numbers are a mistake."""
    x = jnp.array([0.0, 2.0, 9.0])
    found = F.clip_by_value(x, lower=jnp.array([3.0]), upper=jnp.array([1.0]))
    np.testing.assert_array_equal(found, [3.0, 3.0, 3.0])
    with pytest.raises(ValueError, match=r"got lower=3\.0 and upper=1\.0"):
        F.clip_by_value(x, lower=3.0, upper=1.0)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (2.0, 1),
        (np.float32(2), np.float64(1)),
        (jnp.float32(2), 1.0),
        ({"a": 0.0, "b": 2.0}, 1.0),
        (0.0, {"a": 1.0, "b": -1.0}),
        ({"a": 0.0, "b": 2.0}, {"a": None, "b": 1.0}),
    ],
)
def test_bounds_in_the_wrong_order_are_refused(lower, upper):
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"`lower` must be at most `upper`.*Swap"):
        F.clip_by_value(tree, lower=lower, upper=upper)


def test_value_clip_gradient_is_that_of_tensorflow():
    """To x inside and on the bounds, to the bound outside; to lower where they cross."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0])

    def total(x, lower, upper):
        return jnp.sum(
            F.clip_by_value(x, lower=lower, upper=upper) * jnp.array([1.0, 2, 4, 8])
        )

    lower, upper = jnp.full(4, 2.0), jnp.full(4, 3.0)
    slopes = jax.grad(total, (0, 1, 2))(x, lower, upper)
    np.testing.assert_array_equal(slopes[0], [0, 2, 4, 0])
    np.testing.assert_array_equal(slopes[1], [1, 0, 0, 0])
    np.testing.assert_array_equal(slopes[2], [0, 0, 0, 8])


def test_complex_values_are_clipped_by_modulus(run):
    x = jnp.array([3 + 4j, 0.3 + 0.4j, 0j, 3e38 + 3e38j])
    found = run(lambda x: F.clip_by_value(x, lower=-1.0, upper=1.0))(x)
    diagonal = np.sqrt(0.5)
    expected = [0.6 + 0.8j, 0.3 + 0.4j, 0, diagonal + diagonal * 1j]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_infinite_goes_to_the_bound_in_its_direction(run):
    x = jnp.array([complex(np.inf, 1), complex(np.inf, -np.inf), -6 + 8j, 0.1j])
    found = run(lambda x: F.clip_by_value(x, lower=-2.0, upper=2.0))(x)
    exact = [2, 2**0.5 * (1 - 1j), -1.2 + 1.6j, 0.1j]
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_no_modulus_is_above_a_strict_bound(run):
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(5000, 2)) @ [3, 3j], jnp.complex64)
    found = run(lambda z: F.clip_by_value(z, lower=-1.0, upper=1.0, strict=True))(z)
    sizes = np.abs(helpers.as_float64(found))
    assert np.all(sizes <= 1)
    assert np.sum(sizes > 0.999) > 3000


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, np.inf])
def test_a_modulus_above_the_largest_float_has_no_finite_norm(p):
    x = jnp.array([3e38 + 3e38j, 1.0])
    found, norm = F.clip_by_global_norm(x, 1.0, ord=p)
    assert norm == np.inf
    assert np.all(np.isnan(found))


@pytest.mark.parametrize("limit", [np.uint8(2), np.int64(2**40), 2**40, 1e300, 0.1])
def test_a_limit_is_the_same_on_both_sides(limit, run):
    """Whatever its type has for its negative, and however it is rounded."""
    x = jnp.array([-jnp.inf, -3.0, -1.0, 1.0, 3.0, jnp.inf])
    found = run(lambda x: F.clip_by_value(x, limit, strict=True))(x)
    np.testing.assert_array_equal(found, -found[::-1])
    assert np.max(np.abs(np.float64(found))) <= float(limit)
    tx = optclip.clip_by_value(limit, strict=True)
    helpers.assert_identical(found, run(lambda x: tx.update(x, tx.init(x))[0])(x))


def test_a_traced_limit_below_zero_counts_as_zero():
    found = helpers.quick_jit(F.clip_by_value)(jnp.array([-3.0, 1.0]), -1.0)
    np.testing.assert_array_equal(found, [0.0, 0.0])


def test_a_whole_number_past_32_bits_is_a_constant():
    bounds = optclip.thresholds.bounds(-1.0, optclip.thresholds.constant(2**40))
    tx = optclip.clip_by(bounds, over="element")
    x = jnp.array([-3.0, 3.0])
    np.testing.assert_array_equal(tx.update(x, tx.init(x))[0], [-1.0, 3.0])
