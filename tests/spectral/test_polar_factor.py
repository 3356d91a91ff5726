"""Orthogonalization by matrix products against a float64 SVD.

Singular values of at least 1e-3 of the largest become the threshold to within 3e-5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers
from tests.support.matrices import matrix

OPTIONS = {
    "over": optclip.singular_values(method="newton_schulz"),
    "response": "normalize",
}


@functools.cache
def orthogonalizer(**options):
    return helpers.quick_jit(lambda x, c: F.clip_by(x, c, **OPTIONS, **options)[0])


def spectra(k):
    half = np.arange(k) < k // 2
    return [
        np.geomspace(1e-3, 1, k),
        np.linspace(1e-3, 1, k),
        np.ones(k),
        np.where(half, 1, 1e-3),
        np.r_[1, np.full(k - 1, 1e-3)],
        np.r_[np.ones(k - 1), 1e-3],
    ]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 3)])
def test_orthogonalized_spectrum_matches_svd(shape):
    rng = np.random.default_rng(5)
    kinds = spectra(min(shape))
    scales = np.array([1, 1e30, 1e-15, 5.0, 1e-3, 1e6])
    limits = np.float32([1, 1e-3, 1e3, 0.5, 1e20, 1])[:, None]
    exact = np.stack([matrix(rng, values, shape) for values in kinds])
    x = np.float32(exact * scales[:, None, None])
    found = np.float64(orthogonalizer()(x, limits)) / limits[..., None]
    values = np.linalg.svd(found, compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=3e-5)
    u, _, vt = np.linalg.svd(exact, full_matrices=False)
    assert np.all(np.linalg.norm(found - u @ vt, 2, axis=(1, 2)) <= 1e-4)


def test_orthogonalization_keeps_zero_and_lifts_tiny_singular_values():
    """Below 1e-3 of the largest, values end below the threshold; 1e-5 at a 16th."""
    values = np.array([1, 1, 1e-2, 3e-4, 1e-5, 0])
    x = np.float32(matrix(np.random.default_rng(1), values, (6, 9)))
    found = np.linalg.svd(np.float64(orthogonalizer()(x, 1.0)), compute_uv=False)
    np.testing.assert_allclose(found[:3], 1, atol=3e-5)
    assert 0.9 <= found[3] <= 1 + 3e-5
    np.testing.assert_allclose(found[4:], [1 / 16, 0], atol=1e-2)


def test_orthogonalization_of_each_matrix_follows_its_threshold_and_policy():
    x = np.float32(np.random.default_rng(0).normal(size=(8, 4, 6)))
    x[0], x[1] = 0, 1e-30 * x[1]
    x[2, 0, 0], x[3, 1, 1] = np.nan, np.inf
    # A bound that equals the threshold does not make a matrix orthogonal.
    x[7] = np.eye(4, 6) * [1, 1e-2, 1e-2, 1e-2, 0, 0]
    limits = np.float32([1, 1, 1, 1, 0, np.nan, np.inf, 1])[:, None]
    for policy, nonfinite in {"propagate": np.nan, "zero": 0.0}.items():
        found = np.asarray(orthogonalizer(nonfinite=policy)(x, limits))
        helpers.assert_identical(found[[0, 1, 6]], x[[0, 1, 6]])
        want = np.float32([nonfinite, nonfinite, 0, np.nan])
        np.testing.assert_array_equal(found[2:6], want[:, None, None] + 0 * found[7])
        np.testing.assert_allclose(found[7], np.eye(4, 6), atol=3e-5)


def test_orthogonalization_of_narrow_dtype_rounds_once():
    narrow = np.random.default_rng(0).normal(size=(4, 6)).astype(jnp.bfloat16)
    tree = {"narrow": narrow, "wide": narrow.astype(np.float32)}
    found = orthogonalizer()(tree, 1.0)
    helpers.assert_identical(found["narrow"], found["wide"].astype(jnp.bfloat16))
    assert helpers.differs(found["narrow"], narrow)


def test_orthogonalization_takes_at_most_half_more_products_than_muon():
    x = jnp.zeros((8, 8))

    def products(tx):
        program = jax.make_jaxpr(tx.update)(x, tx.init(x)).jaxpr
        found = helpers.equations(program)
        return sum(n for e, n in found if e.primitive.name == "dot_general")

    assert products(optax.contrib.scale_by_muon()) == 15
    assert products(optclip.clip_by(1.0, **OPTIONS)) <= 1.5 * 15
