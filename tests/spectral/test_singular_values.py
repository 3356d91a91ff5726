"""Capped singular values against a float64 SVD, and all else that is per matrix.

Each matrix has its own scale c as its threshold, so one call has matrices of all scales.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optclip
from optclip import functional as F
from optclip import responses
from tests.support import covering, helpers, oracles
from tests.support.matrices import matrix
from tests.support.registry import square_root_capper

SHAPES = [(24, 40), (40, 24), (1, 40), (2, 3)]
SHAPES += [(24, 24), (40, 1)] * covering.full
SCALES = [1.0, 1e-15, 1e15, 1e-6, 1e6, 3e-3]
COEFFICIENTS = {"hard": oracles.hard, "smooth": oracles.smooth}
METHODS = ("eigh", "newton_schulz")
methods = pytest.mark.parametrize("method", METHODS)


def spectra(k):
    """Return spectra in units of c, up to 1000, by name."""
    rng = np.random.default_rng(7)
    half = np.arange(k) < k // 2
    return {
        "gaussian": np.sort(np.abs(rng.normal(size=k)) * np.sqrt(k)),
        "all near c": 1 + 1e-3 * rng.uniform(-1, 1, k),
        "geometric to 10": np.geomspace(1e-4, 10, k),
        "one 30": np.r_[30, np.full(k - 1, 0.1)],
        "one 1000": np.r_[1000, np.full(k - 1, 0.1)],
        "one 1000, a line": np.append(np.linspace(0.5, 1.5, k - 1), 1000),
        "all 0": np.zeros(k),
        "rank 1": np.r_[3, np.full(k - 1, 0)],
        "rank 1, 1000": np.r_[1000, np.full(k - 1, 0)],
        "half the rank": np.where(half, 2.0, 0),
        "half the rank, 1000": np.where(half, 1000.0, 0),
        "all 1": np.ones(k),
        "all 2": np.full(k, 2.0),
        "all 0.5": np.full(k, 0.5),
        "all 1000": np.full(k, 1000.0),
        "two ties": np.where(half, 5.0, 0.5),
        "ties on both sides": np.where(half, 1 + 1e-6, 1 - 1e-6),
        "just above": np.full(k, 1 + 1e-4),
        "just below": np.full(k, 1 - 1e-4),
        "at 1 and 1000": np.where(half, 1000.0, 1.0),
        "at 1.5 and 300": np.where(half, 300.0, 1.5),
        "geometric to 100": np.geomspace(1e-4, 100, k),
        "geometric to 1000": np.geomspace(1e-2, 1000, k),
        "geometric, all above": np.geomspace(2, 1000, k),
        "geometric, all below": np.geomspace(1e-5, 0.9, k),
        "line to 2": np.linspace(0, 2, k),
        "line to 20": np.linspace(0, 20, k),
        "line to 500": np.linspace(0, 500, k),
        "clusters": np.repeat([1e-3, 0.9, 1.1, 90], k)[:: 4][:k] if k > 3 else np.ones(k),
        "decay 1 / i": 100 / np.arange(1.0, k + 1),
        "decay 1 / i^2": 1000 / np.arange(1.0, k + 1) ** 2,
        "exponential": 50 * np.exp(-np.arange(k)),
        "edge of a window": np.where(half, 8.0, 0.1),
        "past a window": np.where(half, 8.1, 1.01),
        "two windows": np.where(half, 64.0, 8.0),
        "one 7.9, line": np.append(np.linspace(0.1, 1.2, k - 1), 7.9),
        "one 65, line": np.append(np.linspace(0.1, 8.2, k - 1), 65),
        "one 100, ones": np.r_[100, np.full(k - 1, 1)],
        "one 999, ones": np.r_[999, np.full(k - 1, 1)],
        "one 500, hundredths": np.r_[500, np.full(k - 1, 1e-2)],
        "uniform to 3": rng.uniform(0, 3, k),
        "uniform to 30": rng.uniform(0, 30, k),
        "uniform to 1000": rng.uniform(0, 1000, k),
        "log-uniform": 10 ** rng.uniform(-3, 3, k),
        "heavy tail": np.minimum(np.abs(rng.standard_cauchy(k)), 1000),
        "log-normal": np.minimum(np.exp(2 * rng.normal(size=k)), 1000),
    }  # fmt: skip


@functools.cache
def clip(method, **how):
    return helpers.quick_jit(
        functools.partial(F.clip_by_singular_value, method=method, **how)
    )


def errors(shape, kinds, method, response):
    """By name: the excess over c, and the errors in the Frobenius and spectral norms.

    The Frobenius error is relative to the exact result, the spectral one to c.
    """
    rng = np.random.default_rng(3)
    scales = np.resize(SCALES, len(kinds))
    x = np.stack([matrix(rng, values, shape) for values in kinds.values()])
    x = np.float32(x * scales[:, None, None])
    clipped = clip(method, response=response)(x, np.float32(scales[:, None]))
    clipped, unit = np.float64(clipped), np.float64(np.float32(scales))
    assert np.all(np.isfinite(clipped))
    wide = np.float64(x) / unit[:, None, None]
    want = oracles.by_singular_value(wide, 1.0, COEFFICIENTS[response])
    off = clipped / unit[:, None, None] - want
    above = np.linalg.norm(off + want, 2, axis=(1, 2)) - 1
    size = np.linalg.norm(want, axis=(1, 2))
    error = np.linalg.norm(off, axis=(1, 2)) / np.where(size > 0, size, 1)
    spectral = np.linalg.norm(off, 2, axis=(1, 2))
    return dict(zip(kinds, zip(above, error, spectral, strict=True), strict=True))


@pytest.mark.covering(shape=SHAPES, response=tuple(COEFFICIENTS), method=METHODS)
def test_capped_spectrum_matches_svd(shape, response, method):
    """Up to 1000 c; by `newton_schulz` up to 100 c. Beyond, only the cap holds."""
    k, kinds = min(shape), spectra(min(shape))
    # Beyond the resolution of float32 only the cap holds.
    far = {
        "one 1e6": np.r_[1e6, np.full(k - 1, 0.1)],
        "one 1e15": np.r_[1e15, np.full(k - 1, 0.1)],
        "geometric to 1e6": np.geomspace(1e-4, 1e6, k),
        # Even the square of its rounding error is lost. Its place has a small scale.
        "all 1e50": np.full(k, 1e50),
        "all 1e15": np.full(k, 1e15),
        "line to 1e4": np.linspace(0, 1e4, k),
        "one 1e30": np.r_[1e30, np.full(k - 1, 0.1)],
        "all 1e6": np.full(k, 1e6),
    }
    found = errors(shape, kinds | far, method, response)
    for name, (above, error, spectral) in found.items():
        loose = method == "newton_schulz" and np.max(kinds.get(name, 0)) > 100
        loose |= name in far
        assert above <= (1e-3 if loose else 1e-5), (name, above)
        assert name in far or error <= (1e-3 if loose else 1e-4), (name, error)
        assert loose or spectral <= 2e-4, (name, spectral)


@pytest.mark.full
def test_capped_spectrum_of_largest_sides_matches_svd():
    """The worst known case has half of 128 singular values at 1000 c."""
    half = np.arange(96) < 48
    kinds = {low: np.where(half, 1000, low) for low in (0.0, 0.9)}
    found = errors((128, 96), kinds, "eigh", "hard").values()
    assert np.all(np.array([*found]) <= [1e-5, 1e-4, 2e-4])


X = (3 * np.random.default_rng(0).normal(size=(3, 4, 6))).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@methods
def test_matrix_below_cap_is_bit_identical(method, dtype):
    """Another matrix of the batch is clipped."""
    x = X.astype(dtype)
    size = np.linalg.norm(np.float64(x), axis=(1, 2), keepdims=True)[..., 0]
    limits = (size * np.array([[1.01], [0.1], [2.0]])).astype(np.float32)
    clipped = clip(method)(x, limits)
    helpers.assert_identical(clipped[::2], x[::2])
    assert helpers.differs(clipped[1], x[1])
    x[0, 0, 0] = np.nan
    unclipped = clip(method)(x, np.full_like(limits, np.inf))
    helpers.assert_identical(unclipped, x)


def test_newton_schulz_keeps_matrix_with_frobenius_norm_below_cap():
    rng = np.random.default_rng(0)
    for rank in [1, 2, 3] * 10:
        x = np.float32(rng.normal(size=(4, rank)) @ rng.normal(size=(rank, 6)))
        c = np.linalg.norm(np.float64(x)) / (1 - 1e-6)
        helpers.assert_identical(clip("newton_schulz")(x, c), x)
        assert np.any(clip("newton_schulz")(x, c / 3) != x)


@methods
def test_thresholds_of_zero_nan_and_inf_apply_per_matrix(method):
    """A traced threshold below 0 counts as 0."""
    zero, below, unknown, one, infinite = clip(method)(
        X[[0, 1, 2, 1, 2]], np.float32([[0.0], [-1.0], [np.nan], [1.0], [np.inf]])
    )
    assert not np.any(zero)
    assert not np.any(below)
    assert np.all(np.isnan(unknown))
    expected = oracles.by_singular_value(np.float64(X[1]), 1.0)
    np.testing.assert_allclose(one, expected, atol=2e-6)
    helpers.assert_identical(infinite, X[2])


RESPONSES = {
    "tanh": ("tanh", lambda n, c: np.tanh(n / c) * c / n),
    "normalize": ("normalize", oracles.normalized),
    "drop": ("drop", lambda n, c: float(n <= c)),
    "band": (responses.band(0.75), lambda n, c: np.clip(n, 0.75 * c, c) / n),
    "detached": (responses.detached("hard"), oracles.hard),
    "user": (square_root_capper, lambda n, c: np.sqrt(min(c / n, 1))),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_response_applies_to_each_singular_value(name):
    response, coefficient = RESPONSES[name]
    values = np.array([0.3, 1.0, 1.9, 2.1, 9.0, 40.0])
    x = matrix(np.random.default_rng(4), values, (6, 9)).astype(np.float32)
    clipped = clip("eigh", response=response)(x, 2.0)
    expected = oracles.by_singular_value(np.float64(x), 2.0, coefficient)
    np.testing.assert_allclose(clipped, expected, atol=1e-4)
    assert helpers.differs(clipped, x)


@pytest.mark.parametrize("top", [2.0, 900.0])
def test_normalize_keeps_zero_singular_values(top):
    """Their rounding error is not scaled up to the threshold."""
    x = matrix(np.random.default_rng(4), [0, 0, 0, 1.0, 2.5, top], (6, 9))
    clipped = clip("eigh", response="normalize")(np.float32(x), 2.0)
    values = np.linalg.svd(np.float64(clipped), compute_uv=False)
    np.testing.assert_allclose(values, [2, 2, 2, 0, 0, 0], atol=2e-3)


@methods
def test_nonfinite_matrix_of_batch_follows_policy(method):
    others = oracles.by_singular_value(np.float64(X[::2]), 1.0)
    ones, mixed = np.float32([[1.0]] * 3), np.float32([[1.0], [np.inf], [1.0]])
    for policy, want in {"propagate": np.nan, "zero": 0.0}.items():
        by_policy = clip(method, nonfinite=policy)
        for bad in (np.nan, np.inf, -np.inf):
            x = X.copy()
            x[1, 2, 3] = bad
            clipped = by_policy(x, ones)
            np.testing.assert_allclose(clipped[::2], others, atol=3e-6)
            np.testing.assert_allclose(clipped[1], np.full((4, 6), want), atol=3e-6)
            helpers.assert_identical(by_policy(x, mixed)[1], x[1])


@pytest.mark.parametrize("policy", ["raise", "zero"])
def test_nonfinite_matrix_is_counted(policy):
    x = X.copy()
    x[1, 2, 3] = np.nan
    tx = optclip.clip_by_singular_value(1.0, method="eigh", nonfinite=policy)
    update = helpers.quick_jit(checkify.checkify(lambda x: tx.update(x, tx.init(x))))
    error, (clipped, state) = update(x)
    assert optclip.metrics(state)["clip/nonfinite"] == 1
    is_raised = "non-finite update in the array" in str(error.get())
    assert np.all(np.isfinite(clipped)) == (not is_raised) == (policy == "zero")


# Orthogonalization by matrix products against a float64 SVD: singular values of at
# least 1e-3 of the largest become the threshold to within 3e-5.

OPTIONS = {
    "over": optclip.singular_values(method="newton_schulz"),
    "response": "normalize",
}


@functools.cache
def orthogonalizer(**options):
    return helpers.quick_jit(lambda x, c: F.clip_by(x, c, **OPTIONS, **options)[0])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 3)])
def test_orthogonalized_spectrum_matches_svd(shape):
    rng = np.random.default_rng(5)
    k = min(shape)
    kinds = [
        np.geomspace(1e-3, 1, k),
        np.linspace(1e-3, 1, k),
        np.ones(k),
        np.where(np.arange(k) < k // 2, 1, 1e-3),
        np.r_[1, np.full(k - 1, 1e-3)],
        np.r_[np.ones(k - 1), 1e-3],
    ]
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
