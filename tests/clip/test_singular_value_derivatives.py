"""Derivatives of a function of singular values, where some are equal or zero too.

The oracle is the first divided difference of s -> f(s): in the basis of the singular
vectors, the symmetric and the antisymmetric part of a change each have a factor.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from optclip import responses
from tests.clip.test_singular_values import METHODS, matrix
from tests.support import helpers
from tools import derivatives as spiked
from tools.derivatives import CAPS, exact

SPECTRA = {
    "distinct": [0.2, 0.6, 1.7, 3.0],
    "all above": [1.2, 1.5, 2.0, 7.0],
    "all below": [0.1, 0.2, 0.4, 0.7],
    "all equal, above": [2.0] * 4,
    "all equal, below": [0.5] * 4,
    "pairs": [0.5, 0.5, 2.0, 2.0],
    "zeros": [0.0, 0.0, 0.5, 2.0],
    "zero": [0.0] * 4,
    "near the kink": [0.9, 0.99, 1.01, 1.1],
    "far": [0.5, 0.8, 3.0, 30.0],
}


@functools.cache
def derivatives(method, cap):
    """Forwards, backwards, and by the threshold, of a batch of matrices."""

    def one(x, along, weights):
        clip = functools.partial(F.clip_by_singular_value, method=method, response=cap)
        _, forward = jax.jvp(lambda x: clip(x, 1.0), (x,), (along,))
        by_x = jax.grad(lambda x: jnp.sum(weights * clip(x, 1.0)))(x)
        by_c = jax.grad(lambda c: jnp.sum(weights * clip(x, c)))(jnp.ones((), x.dtype))
        return forward, by_x, by_c

    return helpers.quick_jit(jax.vmap(one))


def some(shape):
    rng = np.random.default_rng(6)
    x = np.stack([matrix(rng, np.array(s), shape) for s in SPECTRA.values()])
    return x, rng.normal(size=x.shape), rng.normal(size=x.shape)


@pytest.mark.parametrize("shape", [(4, 6), (4, 4)], ids=str)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_that_of_divided_differences(method, cap, shape):
    """By the matrix in both modes and by the threshold, under vmap and jit."""
    x, along, weights = some(shape)
    with jax.enable_x64(True), jax.debug_nans(True):
        found = jax.device_get(derivatives(method, cap)(x, along, weights))
    for i, name in enumerate(SPECTRA):
        forward, by_x, by_c = (part[i] for part in found)
        want = exact(x[i], along[i], cap)
        size = np.linalg.norm(along[i])
        # Products find a sign by steps that end where float32 has it.
        room = 1e-6 if method == "eigh" else 1e-4
        np.testing.assert_allclose(forward, want, atol=room * size, err_msg=name)
        reverse = np.sum(by_x * along[i])
        np.testing.assert_allclose(
            reverse, np.sum(weights[i] * want), atol=room * size, err_msg=name
        )
        u, s, vt = np.linalg.svd(x[i], full_matrices=False)
        by_limit = np.sum(weights[i] * ((u * CAPS[cap][2](s)) @ vt))
        np.testing.assert_allclose(by_c, by_limit, atol=room * 10, err_msg=name)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("method", METHODS)
def test_in_float32_it_is_finite_at_any_spectrum(method, cap):
    x, along, weights = (np.float32(a) for a in some((4, 6)))
    x = np.concatenate([x, np.tile(np.eye(4, 6, dtype=np.float32), (2, 1, 1))])
    x[-1] *= 1000
    along, weights = (np.concatenate([a, a[:2]]) for a in (along, weights))
    found = derivatives(method, cap)(x, along, weights)
    for part in found:
        assert np.all(np.isfinite(part)), part
    forward = np.stack([exact(np.float64(a), b, cap) for a, b in zip(x[:-2], along[:-2], strict=True)])  # fmt: skip
    smooth = np.array([name not in ("far", "near the kink") for name in SPECTRA])
    np.testing.assert_allclose(found[0][:-2][smooth], forward[smooth], atol=5e-3)


@pytest.mark.parametrize("dtype", spiked.DTYPES)
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (4, 100)], ids=str)
@pytest.mark.parametrize("cap", CAPS)
def test_in_float32_it_is_right_beside_singular_values_of_1000_thresholds(
    cap, shape, dtype
):
    """Forwards, and backwards by a product with any weights, to 5e-5 of its norm."""
    for name, error in spiked.errors(cap, shape, dtype, helpers.quick_jit).items():
        assert error <= spiked.ROOM, name


@pytest.mark.parametrize("cap", CAPS)
def test_value_and_derivative_are_of_one_decomposition(cap):
    def value(x):
        return jnp.sum(F.clip_by_singular_value(x, 1.0, response=cap))

    def decompositions(function):
        compiled = jax.jit(function).lower(jnp.ones((4, 6))).compile()
        return compiled.as_text().count("syevd")

    assert 0 < decompositions(jax.value_and_grad(value)) <= decompositions(value)


@pytest.mark.parametrize("spectrum", ["distinct", "far"])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives_are_finite_away_from_ties(method, cap, spectrum):
    """And right: by differences of the first, along one direction."""
    x, along, weights = (a[list(SPECTRA).index(spectrum)] for a in some((4, 6)))

    def slope(x):
        clip = functools.partial(F.clip_by_singular_value, method=method, response=cap)
        return jax.grad(lambda x: jnp.sum(weights * clip(x, 1.0)))(x)

    with jax.enable_x64(True):
        curve = helpers.quick_jit(lambda x: jax.jvp(slope, (x,), (along,))[1])(x)
        ahead, behind = (helpers.quick_jit(slope)(x + h * along) for h in (1e-5, -1e-5))
        by_differences = np.asarray((ahead - behind) / 2e-5)
    assert np.all(np.isfinite(curve))
    # Of products, those of a polynomial that comes near to a sign.
    room = 1e-4 if method == "eigh" else 1e-2
    size = np.max(np.abs(by_differences))
    np.testing.assert_allclose(curve, by_differences, atol=room * size)


@pytest.mark.parametrize("cap", CAPS)
def test_second_derivatives_are_finite_at_any_spectrum(cap):
    """In float32, backwards twice: which no loop takes that has no rule of its own."""
    x, _, weights = (np.float32(a) for a in some((4, 6)))
    x[0] *= 1000
    x[1] *= 1e15

    def slope(x, weights):
        clip = functools.partial(F.clip_by_singular_value, response=cap)
        by_x = jax.grad(lambda x: jnp.sum(weights * clip(x, 1.0)))(x)
        return jnp.sum(by_x**2)

    with jax.debug_nans(True):
        curve = helpers.quick_jit(jax.vmap(jax.grad(slope)))(x, weights)
    assert np.all(np.isfinite(curve))


def test_the_spectral_norm_has_a_derivative_at_ties():
    """A mean of those of the vectors that share it: finite, and of length at most 1."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)

    def loss(x):
        return jnp.sum(weights * F.clip_by_spectral_norm(x, 1.0))

    for x in (2 * jnp.eye(4, 6), jnp.zeros((4, 6)), jnp.eye(4, 6)):
        assert np.all(np.isfinite(helpers.quick_jit(jax.grad(loss))(x)))
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x = matrix(rng, np.array([0.2, 0.6, 1.7, 3.0]), (4, 6))
        along = rng.normal(size=x.shape)
        found = jnp.sum(jax.grad(loss)(x) * along)
        wide = jnp.float64(weights)

        def exactly(x):
            return np.sum(wide * x) / np.linalg.norm(x, 2)

        slope = (exactly(x + 1e-6 * along) - exactly(x - 1e-6 * along)) / 2e-6
    np.testing.assert_allclose(found, slope, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_under_scan_it_is_as_alone(method):
    x, _, weights = (np.float32(a) for a in some((4, 6)))
    clip = functools.partial(F.clip_by_singular_value, method=method)

    def by_scan(x):
        def step(carry, part):
            one, weight = part
            return carry + jnp.sum(weight * clip(one, 1.0)), None

        return jax.lax.scan(step, jnp.float32(0), (x, weights))[0]

    found = helpers.quick_jit(jax.grad(by_scan))(x)
    alone = jax.grad(lambda x: jnp.sum(weights * clip(x, 1.0)))(x)
    smooth = np.array(["kink" not in name for name in SPECTRA])
    np.testing.assert_allclose(found[smooth], alone[smooth], atol=2e-3)


def test_clip_by_singular_value_response_of_traced_integer_has_its_derivative():
    """The response closes over the step of a scan, and clips in one step only."""
    x, along, _ = (a[:2] for a in some((4, 6)))

    def by_scan(x):
        def step(i, one):
            def response(value, limit):
                return jnp.where(i == 1, jnp.minimum(1, limit / value), 1.0)

            return i + 1, F.clip_by_singular_value(one, 1.0, response=response)

        return jax.lax.scan(step, 0, x)[1]

    with jax.enable_x64(True):
        values, changes = jax.jvp(by_scan, (x,), (along,))
    assert helpers.differs(values[1], x[1])
    expected = along[0], exact(x[1], along[1], "hard")
    np.testing.assert_allclose(changes, expected, atol=1e-6)


def test_detached_coefficients_are_constants():
    """The derivative is u k(s) u^T of the change, as if the vectors did not move."""
    x, along, _ = (a[0] for a in some((4, 6)))
    with jax.enable_x64(True):
        clip = functools.partial(
            F.clip_by_singular_value, response=responses.detached("hard")
        )
        _, found = jax.jvp(lambda x: clip(x, 1.0), (x,), (along,))
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(found, (u / np.maximum(s, 1)) @ (u.T @ along), atol=1e-9)


def test_the_value_of_a_schedule_has_a_derivative():
    """What a response closes over reaches through the rule for singular values."""
    x, _, weights = (a[0] for a in some((4, 6)))

    def loss(c):
        tx = optclip.clip_by_singular_value(lambda step: c + 0 * step)
        return jnp.sum(weights * tx.update(x, tx.init(x))[0])

    def by_sharpness(p):
        found = F.clip_by_singular_value(x, 1.0, response=lambda n, c: (c / n) ** p)
        return jnp.sum(weights * found)

    u, s, vt = np.linalg.svd(x, full_matrices=False)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            jax.grad(loss)(1.0), np.sum(weights * ((u * (s > 1)) @ vt)), atol=1e-7
        )
        slope = jax.grad(by_sharpness)(0.5)
    exactly = np.sum(weights * ((u * (-np.log(s) * np.sqrt(s))) @ vt))
    np.testing.assert_allclose(slope, exactly, atol=1e-7)
