"""Derivatives of functions of singular values, also where some are equal or zero.

The reference is the first divided difference of s -> f(s): in the basis of the singular
vectors, the symmetric and the antisymmetric part of a change each have a factor.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from optclip import responses
from tests.support import covering, helpers
from tests.support import spiked_derivatives as spiked
from tests.support.matrices import matrix
from tests.support.spiked_derivatives import CAPS, exact

TIED = {
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
    """Compile all derivatives for a batch of matrices."""

    def one(x, along, weights):
        clip = functools.partial(F.clip_by_singular_value, method=method, response=cap)
        _, forward = jax.jvp(lambda x: clip(x, 1.0), (x,), (along,))
        gradient = jax.grad(lambda *x: jnp.sum(weights * jnp.real(clip(*x))), (0, 1))
        return forward, *gradient(x, jnp.ones((), weights.dtype))

    return helpers.quick_jit(jax.vmap(one))


def batch(shape=(4, 6), dtype=np.float64, spectra=TIED):
    """Return matrices of each spectrum, directions and weights."""
    rng = np.random.default_rng(6)
    x = np.stack([matrix(rng, np.array(s), shape) for s in spectra.values()])
    parts = x, rng.normal(size=x.shape), rng.normal(size=x.shape)
    return [part.astype(dtype) for part in parts]


@pytest.mark.parametrize(
    ("shape", "cap", "method"),
    [
        ((4, 6), "hard", "eigh"),
        ((4, 4), "smooth", "newton_schulz"),
        ((4, 6), "normalize", "newton_schulz"),
    ]
    + [
        ((4, 4), "smooth", "eigh"),
        ((4, 6), "smooth", "newton_schulz"),
        ((4, 4), "hard", "newton_schulz"),
    ]
    * covering.full,
)
def test_derivative_matches_divided_differences(shape, cap, method):
    """By the matrix in both modes and by the threshold, under vmap and jit."""
    x, along, weights = batch(shape)
    with jax.enable_x64(True), jax.debug_nans(True):
        found = jax.device_get(derivatives(method, cap)(x, along, weights))
    # Newton-Schulz iterates until the sign converges in float32.
    room = 1e-6 if method == "eigh" else 1e-4
    for i, (name, values) in enumerate(TIED.items()):
        if cap == "normalize" and not min(values):
            continue  # The derivative at 0 does not exist.
        forward, by_x, by_c = (part[i] for part in found)
        want = exact(x[i], along[i], cap)
        atol = room * np.linalg.norm(along[i])
        np.testing.assert_allclose(forward, want, atol=atol, err_msg=name)
        reverse, expected = np.sum(by_x * along[i]), np.sum(weights[i] * want)
        np.testing.assert_allclose(reverse, expected, atol=atol, err_msg=name)
        u, s, vt = np.linalg.svd(x[i], full_matrices=False)
        by_limit = np.sum(weights[i] * ((u * CAPS[cap][2](s)) @ vt))
        np.testing.assert_allclose(by_c, by_limit, atol=room * 10, err_msg=name)


def with_ties(x, *parts):
    """Append two matrices with exactly equal singular values to a float32 batch."""
    ties = np.eye(4, 6, dtype=np.float32) * np.float32([1, 1000])[:, None, None]
    return np.concatenate([x, ties]), *(np.concatenate([a, a[:2]]) for a in parts)


def test_float32_derivative_by_newton_schulz_is_finite_at_any_spectrum():
    parts = with_ties(*batch(dtype=np.float32))
    for part in derivatives("newton_schulz", "smooth")(*parts):
        assert np.all(np.isfinite(part))


@pytest.mark.parametrize(
    ("cap", "shape", "dtype"),
    [
        ("hard", (24, 16), "float32"),
        ("smooth", (4, 40), "complex64"),
    ]
    + [*itertools.product(("hard", "smooth"), spiked.SHAPES, spiked.DTYPES)]
    * covering.full,
)
def test_float32_derivative_with_large_singular_values_is_accurate(cap, shape, dtype):
    """Up to 1000 times the threshold, the error is at most 5e-5 of the norm."""
    spectra = spiked.beside_spikes(min(shape))
    x, along, weights = batch(shape, np.float32, spectra)
    if dtype == "complex64":
        # A unitary diagonal preserves the singular values.
        turn = np.exp(2j * np.random.default_rng(2).normal(size=shape[1]))
        x, along = (x * turn).astype(dtype), (along * turn[::-1]).astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        forward, by_x, _ = derivatives("eigh", cap)(x, along, weights)
    errors = {}
    for i, name in enumerate(spectra):
        want = exact(x[i].astype(complex), along[i].astype(complex), cap)
        size = np.linalg.norm(want)
        # JAX conjugates the gradient of a real function of complex numbers.
        reverse = np.sum(np.real(np.complex128(by_x[i]) * along[i]))
        error = abs(reverse - np.sum(weights[i] * np.real(want)))
        relative = error / np.linalg.norm(weights[i]), np.linalg.norm(forward[i] - want)
        errors[name] = max(relative) / size
    print("largest error:", max(errors.values()))
    assert np.max([*errors.values()]) <= 5e-5, errors


def test_value_and_derivative_share_one_decomposition():
    def value(x):
        return jnp.sum(F.clip_by_singular_value(x, 1.0))

    def decompositions(function):
        lowered = jax.jit(function).lower(jnp.ones((4, 6)))
        return lowered.compile().as_text().count("syevd")

    assert 0 < decompositions(jax.value_and_grad(value)) <= decompositions(value)


def weighted(weights, **how):
    """Return a weighted sum of the capped matrix."""
    return lambda x: jnp.sum(weights * F.clip_by_singular_value(x, 1.0, **how))


@pytest.mark.full
def test_second_derivative_by_newton_schulz_matches_differences():
    """Away from ties; the polynomial for the sign has an error of a percent."""

    def curves(x, along, weights):
        slope = jax.grad(weighted(weights, method="newton_schulz", response="smooth"))
        ahead, behind = (slope(x + step * along) for step in (1e-5, -1e-5))
        return jax.jvp(slope, (x,), (along,))[1], (ahead - behind) / 2e-5

    places = [list(TIED).index(name) for name in ("distinct", "far")]
    with jax.enable_x64(True):
        found = helpers.quick_jit(jax.vmap(curves))(*(part[places] for part in batch()))
    for curve, by_differences in zip(*map(np.asarray, found), strict=True):
        atol = 1e-2 * np.max(np.abs(by_differences))
        np.testing.assert_allclose(curve, by_differences, atol=atol)


def test_second_derivative_in_reverse_mode_is_finite_at_any_spectrum():
    """Reverse over reverse in float32: no loop without its own rule allows it."""
    x, _, weights = with_ties(*batch(dtype=np.float32))
    x[0] *= 1000
    x[1] *= 1e15

    def slope(x, weights):
        return jnp.sum(jax.grad(weighted(weights))(x) ** 2)

    with jax.debug_nans(True):
        curve = helpers.quick_jit(jax.vmap(jax.grad(slope)))(x, weights)
    assert np.all(np.isfinite(curve))


def test_spectral_norm_derivative_at_ties_is_finite():
    weights = batch()[2][0]
    slope = helpers.quick_jit(
        jax.grad(lambda x: jnp.sum(weights * F.clip_by_spectral_norm(x, 1.0)))
    )
    with jax.enable_x64(True):
        for tied in (2 * np.eye(4, 6), np.zeros((4, 6)), np.eye(4, 6)):
            assert np.all(np.isfinite(slope(tied)))


def test_response_of_traced_integer_has_derivative():
    """The response closes over a step, which has no derivative."""
    x, along, weights = (a[0] for a in batch())

    @helpers.quick_jit
    def both(x, step):
        def response(value, limit):
            return jnp.where(step == 1, jnp.minimum(1, limit / value), 1.0)

        clip = weighted(weights, response=response)
        return jax.jvp(clip, (x,), (along,))[1], jnp.sum(jax.grad(clip)(x) * along)

    with jax.enable_x64(True):
        for step, change in enumerate((along, exact(x, along, "hard"))):
            expected = np.sum(weights * change)
            np.testing.assert_allclose(both(x, step), [expected] * 2, atol=1e-6)


def test_detached_response_has_constant_coefficients():
    """The derivative is u k(s) u^T of the change, as if the vectors did not move."""
    x, along, _ = (a[0] for a in batch())
    clip = functools.partial(
        F.clip_by_singular_value, max_value=1.0, response=responses.detached("hard")
    )
    with jax.enable_x64(True):
        _, found = helpers.quick_jit(lambda *given: jax.jvp(clip, *given))([x], [along])
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(found, (u / np.maximum(s, 1)) @ (u.T @ along), atol=1e-9)


def test_value_in_closure_of_response_has_derivative():
    """Derivatives pass through the rule for singular values."""
    x, _, weights = (a[0] for a in batch())

    with jax.enable_x64(True):
        by_power = helpers.quick_jit(
            jax.grad(lambda p: weighted(weights, response=lambda n, c: (c / n) ** p)(x))
        )(0.5)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    expected = np.sum(weights * ((u * (-np.log(s) * np.sqrt(s))) @ vt))
    np.testing.assert_allclose(by_power, expected, atol=1e-7)
