"""The shipped responses, names, and what a user's own may be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import responses
from tests.support import oracles

NORMS = [0.0, 1e-30, 0.5, 1.0, 1.0000001, 3.0, 1e10, 1e36]
F32 = float(np.finfo(np.float32).max)
FORMULAS = [
    (responses.Hard(), oracles.hard),
    (responses.Smooth(), oracles.smooth),
    (responses.Normalize(), oracles.normalized),
    (responses.Smooth(1.0), lambda n, c: 1 / (1 + n / c)),
    (responses.Smooth(8.0), lambda n, c: min(1, c / n) / (1 + min(n / c, c / n) ** 8) ** (1 / 8) if n else 1),
    (responses.Drop(), lambda n, c: float(n <= c)),
    (responses.Tanh(), lambda n, c: c * math.tanh(n / c) / n if n else 1),
    (responses.band(0.5), lambda n, c: c / n if n > c else max(1.0, min(0.5 * c / n, F32)) if n else 1),
    (responses.band(0.5, min_norm=0.6, max_shrink=0.2, max_growth=3.0), lambda n, c: max(c / n, 0.2) if n > c else max(1.0, min(max(0.5 * c, 0.6) / n, 3.0)) if n else 1),
]  # fmt: skip


@pytest.mark.parametrize(("response", "formula"), FORMULAS)
def test_responses_follow_their_formulas(response, formula, run):
    coefficient = run(lambda n, c: response.coefficient(n, c))
    for c in (1.0, 0.25, 7.0):
        for n in NORMS:
            expected = formula(float(np.float32(n)), c)
            found = coefficient(jnp.float32(n), jnp.float32(c))
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("response", [r for r, _ in FORMULAS])
def test_responses_at_zero_and_inf(response):
    one, zero, inf = jnp.float32(1), jnp.float32(0), jnp.float32(jnp.inf)
    shrink = getattr(response, "max_shrink", 0.0)
    assert response.coefficient(one, zero) == np.float32(shrink)
    assert response.coefficient(one, inf) == 1
    assert response.coefficient(zero, one) == 1
    assert np.isnan(response.coefficient(one, jnp.float32(jnp.nan)))
    slopes = jax.grad(response.coefficient, (0, 1))(zero, one)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("response", ["hard", "smooth", "normalize"])
def test_norms_far_above_the_threshold_have_a_coefficient(response):
    """A coefficient next to the smallest float."""
    x = jnp.full(1024, 1e30)
    tx = optclip.clip_by(1e-6, response=response)
    found, _ = tx.update(x, tx.init(x))
    np.testing.assert_allclose(oracles.norm(found), 1e-6, rtol=1e-5)


def test_a_plain_function_and_an_object():
    x = jnp.array([3.0, 4.0])

    class Halve:
        def coefficient(self, norm, threshold):
            return jnp.full_like(norm, 0.5)

    for response in (lambda norm, threshold: 0.5, Halve()):
        tx = optclip.clip_by(1.0, response=response)
        np.testing.assert_array_equal(tx.update(x, tx.init(x))[0], x / 2)


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_a_response_is_not_asked_about_zeros(c):
    """So c / n, which is 0 / 0 there, does no harm, nor does its derivative."""
    tx = optclip.clip_by(c, response=lambda n, c: jnp.minimum(1.0, c / n))
    x = jnp.zeros(3)
    np.testing.assert_array_equal(tx.update(x, tx.init(x))[0], x)
    slope = jax.grad(lambda x: jnp.sum(tx.update(x, tx.init(x))[0]))(x)
    # At a threshold of 0 the clip is 0 everywhere.
    np.testing.assert_array_equal(slope, np.full(3, c > 0))


def test_responses_are_values():
    """Equal if they say the same, so that jit caches and comparisons work."""
    for kind in (responses.Hard, responses.Smooth, responses.Normalize):
        assert kind() == kind()
        assert hash(kind()) == hash(kind())
    assert responses.Smooth(1.0) != responses.Smooth(2.0)
    assert responses.detached("hard") == responses.detached(responses.Hard())


@pytest.mark.parametrize("response", [responses.Hard(), responses.Smooth()])
def test_a_zero_norm_asked_about_directly(response):
    zero = jnp.float32(0.0)
    with jax.debug_nans(True):
        assert response.coefficient(zero, zero) == 1.0
        assert response.coefficient(zero, jnp.float32(2.0)) == 1.0


def test_an_element_at_its_bound_keeps_its_sign():
    x, one = jnp.float32(-0.0), jnp.float32(1.0)
    assert np.signbit(responses.Hard().element(x, -one, jnp.float32(0.0)))
    assert not np.signbit(responses.Hard().element(-x, jnp.float32(-0.0), one))


def test_normalized_elements():
    x = jnp.array([-0.5, -2.0, 0.0, 0.5, 3.0])
    found = responses.Normalize().element(x, jnp.float32(-1.0), jnp.float32(2.0))
    np.testing.assert_array_equal(found, [-1, -1, 0, 2, 2])


@pytest.mark.parametrize("name", ["softsign", "tanh"])
@pytest.mark.parametrize("size", [1e-10, 1e-3, 1.0, 1e30])
def test_curves_of_elements(name, size, run):
    """In every size the same curve, odd, and straight at zero."""
    x = np.array([-3.0, -1.0, -1e-3, 0.0, 1e-6, 0.5, 40.0])
    curve = {
        "softsign": lambda r: r / (1 + np.abs(r)),
        "tanh": np.tanh,
    }[name]
    tx = optclip.clip_by_value(size, response=name)
    given = jnp.asarray(x * size, jnp.float32)
    found = run(lambda t: tx.update(t, tx.init(t))[0])(given)
    expected = size * curve(np.asarray(given, np.float64) / float(np.float32(size)))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=size * 1e-20)


def test_dropped_elements(run):
    tx = optclip.clip_by_value(lower=-1.0, upper=2.0, response="drop")
    x = jnp.array([-1.5, -1.0, 0.0, 2.0, 2.5, jnp.inf, jnp.nan])
    found = run(lambda t: tx.update(t, tx.init(t))[0])(x)
    np.testing.assert_array_equal(found, [0.0, -1.0, 0.0, 2.0, 0.0, 0.0, jnp.nan])
    bounds = jnp.array([jnp.nan, 1.0])
    for lower, upper in ((-bounds, 1.0), (-1.0, bounds)):
        found = responses.Drop().element(jnp.zeros(2), jnp.asarray(lower), upper)
        np.testing.assert_array_equal(np.isnan(found), [True, False])


@pytest.mark.parametrize("name", ["softsign", "tanh"])
def test_curves_are_straight_far_below_the_threshold(name):
    tx = optclip.clip_by_value(1e30, response=name)
    x = jnp.array([1e-15, -1.0, 1e10])
    np.testing.assert_allclose(tx.update(x, tx.init(x))[0], x, rtol=1e-6)


def test_proportional_keeps_what_is_at_the_threshold_and_every_sign(run):
    tx = optclip.clip_by_value(0.25, response="proportional")
    x = jnp.array([-0.5, 0.25, -0.25, 1.0])
    found = run(lambda t: tx.update(t, tx.init(t))[0])(x)
    np.testing.assert_array_equal(found, [-0.125, 0.25, -0.25, 0.25])


def test_proportional_elements(run):
    tx = optclip.clip_by_value(1.0, response="proportional")
    tree = {"a": jnp.array([-4.0, 0.5, 2.0]), "b": jnp.array([0.9]), "c": jnp.zeros(0)}
    found = run(lambda t: tx.update(t, tx.init(t))[0])(tree)
    np.testing.assert_allclose(found["a"], [-1.0, 0.5, 0.5])
    np.testing.assert_array_equal(found["b"], tree["b"])


def test_a_band_s_lower_edge_may_be_scheduled():
    band = responses.band(lambda step: 0.25 * (step + 1))
    for response in (band, responses.detached(band)):
        tx = optclip.clip_by_global_norm(4.0, response=response)
        state = tx.init(jnp.zeros(1))
        found = []
        for _ in range(3):
            out, state = jax.jit(tx.update)(jnp.array([0.1]), state)
            found.append(float(out[0]))
        np.testing.assert_allclose(found, [1.0, 2.0, 3.0], rtol=1e-6)


def test_what_a_rule_sees_of_proportional_elements():
    norms = jnp.array([4.0, 0.5, 2.0])
    found = responses.Proportional().coefficient(norms, jnp.ones(3))
    np.testing.assert_allclose(found, [0.25, 1.0, 0.25])
