"""A clip by the norm of the step before."""

import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers

NORMS = [5.0, 20.0, 0.1, 0.0, 3.0, 1e10, 7.0, 0.2]


def oracle(norms, limit):
    """In float64: scaled by the last norm that was not 0, the first by its own."""
    found, before = [], 0.0
    for norm in norms:
        judged = before or norm
        found.append(norm * min(1.0, limit / judged) if judged else 0.0)
        before = norm
    return found


@pytest.mark.parametrize("over", ["tree", "leaf"])
def test_each_norm_is_scaled_by_the_one_before(over):
    tx = optclip.clip_by(thresholds.previous_norm(2.0), over=over)
    state, update = tx.init(jnp.zeros(2)), helpers.quick_jit(tx.update)
    for norm, expected in zip(NORMS, oracle(NORMS, 2.0), strict=True):
        x = jnp.array([0.6, -0.8]) * norm
        found, state = update(x, state)
        np.testing.assert_allclose(found, np.array([0.6, -0.8]) * expected, rtol=2e-6)
        if expected == norm:
            helpers.assert_identical(found, x)


def test_a_norm_that_is_not_finite_is_not_the_norm_before():
    tx = optclip.clip_by_global_norm(thresholds.previous_norm(1.0), nonfinite="zero")
    state = tx.init(jnp.zeros(1))
    for norm, expected in ((4.0, 1.0), (np.nan, 0.0), (8.0, 2.0)):
        found, state = tx.update(jnp.array([norm]), state)
        np.testing.assert_allclose(found, [expected], rtol=1e-6)
