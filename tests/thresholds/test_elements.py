"""Thresholds of single elements by hand: moments, maxima and bounds."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers
from tests.support.running_rules import INF, updated


def test_second_moments_are_those_by_hand():
    rule = thresholds.second_moment(4.0, 0.5, warmup=1)
    memory = rule.init(jnp.zeros(2))
    limit, memory = updated(rule, np.array([3.0, 0.0]), memory)
    assert np.all(limit == INF)
    # The root of half of 9, times the root of 4; a zero is not known.
    limit, memory = updated(rule, np.array([1.0, 5.0]), memory)
    np.testing.assert_allclose(limit, [2 * math.sqrt(4.5), INF], rtol=1e-6)
    square = [0.5 * 4.5 + 0.5, 0.5 * 25]
    np.testing.assert_allclose(memory.value, np.sqrt(square), rtol=1e-6)
    assert memory.steps == 2


def test_the_average_of_maxima_is_that_by_hand():
    rule = thresholds.ema_of_max(0.5)
    memory = rule.init(jnp.zeros(3))
    chex.assert_shape(memory.value, ())
    for norms, wanted in (([1.0, 4.0, 2.0], 4.0), ([1.0, 1.0, 1.0], 2.0)):
        limit, memory = updated(rule, np.array(norms), memory)
        np.testing.assert_allclose(limit, wanted, rtol=1e-6)


def test_the_maximum_of_nothing_is_zero():
    rule = thresholds.ema_of_max(0.5)
    limit, _ = updated(rule, np.zeros(0), rule.init(jnp.zeros(0)))
    assert limit == 0.0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_moments_are_those_by_hand(power):
    rule = thresholds.moment(power, 0.75)
    memory = rule.init(jnp.zeros(2))
    exact = np.zeros(2)
    for norms in ([3.0, 0.0], [1.0, 0.0], [8.0, 2.0]):
        limit, memory = updated(rule, np.array(norms), memory)
        exact = 0.75 * exact + 0.25 * np.array(norms) ** power
        np.testing.assert_allclose(limit, exact ** (1 / power), rtol=1e-5)


def test_a_side_without_a_bound_is_not_clipped():
    values = jnp.array([-9.0, 9.0])
    for bounds, left in (
        (thresholds.bounds(upper=1.0), [-9.0, 1.0]),
        (thresholds.bounds(lower=-1.0), [-1.0, 9.0]),
    ):
        tx = optclip.clip_by(bounds, over="element")
        found, _ = helpers.quick_jit(tx.update)(values, tx.init(values))
        np.testing.assert_array_equal(found, left)


def test_the_derivative_of_a_moment_is_finite_at_zero():
    tx = optclip.clip_by_value(thresholds.moment(2.0))
    state = tx.init(jnp.zeros(2))
    slopes = helpers.quick_jit(jax.jacrev(lambda u: tx.update(u, state)[0]))
    assert np.all(np.isfinite(slopes(jnp.zeros(2))))
