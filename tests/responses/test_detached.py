"""The clip out of a meta-gradient: a coefficient that is a constant to JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from optclip import responses
from tests.support import helpers
from tests.support.helpers import quick_jit
from tests.support.registry import LargestSoFar, square_root_capper

X = jnp.array([[3.0, 0.1], [4.0, 0.2]])
SCOPES = {
    "tree": "tree",
    "leaf": "leaf",
    "axes": optclip.axes(0),
    "element": "element",
}


def clip(x, c, **kwargs):
    tx = optclip.clip_by(c, record=False, **kwargs)
    return tx.update(x, tx.init(x))[0]


def slope(function, x):
    """The Jacobian as a matrix, forwards, which must be the same backwards."""
    n = x.size
    both = quick_jit(lambda x: (jax.jacfwd(function)(x), jax.jacrev(function)(x)))
    forward, reverse = (side.reshape(n, n) for side in both(x))
    size = float(jnp.max(jnp.abs(forward)))
    wide = (np.asarray(side, np.float64) for side in (forward, reverse))
    np.testing.assert_allclose(*wide, rtol=0, atol=1e-6 * size)
    return forward


@pytest.mark.covering(
    over=tuple(SCOPES),
    response=("hard", "smooth", "normalize", square_root_capper),
    # One of each kind of engine with all four, the others with two.
    where=lambda over, response: (
        over in ("tree", "element") or response in ("hard", "normalize")
    ),
)
def test_the_derivative_is_the_coefficient_alone(over, response):
    """The same updates; their derivative is the coefficient alone."""
    kwargs = {"over": SCOPES[over], "norm": "l2"}

    def found(x):
        return clip(x, 1.0, response=responses.detached(response), **kwargs)

    def attached(x):
        return clip(x, 1.0, response=response, **kwargs)

    expected, clipped = quick_jit(lambda x: (attached(x), found(x)))(X)
    helpers.assert_close(clipped, expected, ulps=2)
    assert helpers.differs(clipped, X)
    exact = np.diag(np.ravel(expected / X))
    np.testing.assert_allclose(slope(found, X), exact, rtol=1e-6)
    with_clip = slope(attached, X)
    assert np.max(np.abs(with_clip - exact)) > 0.05


@pytest.mark.parametrize("times", [0.5, 1.0, 1e6, 2.0**60, 1e25])
def test_that_holds_at_any_distance_from_the_threshold(times):
    """Also where the coefficient is held as two factors."""
    x = np.float32(times) * jnp.array([0.6, -0.8])
    found = slope(lambda x: clip(x, 1.0, response=responses.detached()), x)
    exact = np.eye(2, dtype=np.float32) * min(1.0, 1 / times)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    np.testing.assert_array_equal(
        slope(lambda x: clip(x, 1.0, response=responses.detached()), 0 * x), np.eye(2)
    )


def test_nothing_goes_to_the_threshold_or_through_a_rule():
    by_threshold = jax.grad(
        lambda c: jnp.sum(clip(X, c, response=responses.detached()))
    )
    assert by_threshold(1.0) == 0
    found = slope(lambda x: clip(x, LargestSoFar(), response=responses.detached()), X)
    np.testing.assert_allclose(found, 0.5 * np.eye(4), rtol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_left_is_linear_in_the_updates(strict):
    """What is left is linear in the updates, in any dtype, strict or not.

    Strict clips end up to 1.3e-4 below.
    """
    x = X.astype(jnp.bfloat16)

    def found(x):
        return clip(x, 1.0, response=responses.detached(), strict=strict)

    k = 1 / np.linalg.norm(np.asarray(x, np.float32))
    exact = k * np.eye(4)
    np.testing.assert_allclose(slope(found, x).astype(jnp.float32), exact, rtol=2**-7)
    bend = jax.jit(jax.hessian(lambda x: jnp.sum(found(x) * x)))(X)
    exact = 2 * np.eye(4) / np.linalg.norm(X)
    np.testing.assert_allclose(bend.reshape(4, 4), exact, rtol=1.3e-4)


def test_a_norm_in_hand_may_be_a_constant_in_the_pure_layer():
    """A norm in hand is a constant if the caller makes it one; the threshold is not."""

    def found(x, c):
        norm = jax.lax.stop_gradient(F.global_norm(x))
        return F.clip_by_global_norm(x, c, use_norm=norm)[0]

    n = float(F.global_norm(X))
    np.testing.assert_allclose(
        slope(lambda x: found(x, 1.0), X), np.eye(4) / n, rtol=1e-6
    )
    by_threshold = jax.jacobian(found, 1)(X, 1.0)
    np.testing.assert_allclose(by_threshold, X / n, rtol=1e-6)
