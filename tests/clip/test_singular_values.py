"""Singular values against a float64 SVD: spectra of every kind, of any shape and scale.

The threshold c of a matrix is its own scale, so that one call has matrices of all scales.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from tests.support import helpers

SHAPES = [(24, 40), (40, 24), (24, 24), (1, 40), (40, 1), (2, 3)]
SCALES = [1.0, 1e-15, 1e15, 1e-6, 1e6, 3e-3]
RESPONSES = {
    "hard": lambda s: np.minimum(s, 1.0),
    "soft": lambda s: s / np.sqrt(1 + s**2),
}
METHODS = ["eigh", "newton_schulz"]


def _rest(first, others, k):
    return np.concatenate([np.full(1, first), np.full(k - 1, others)])


def spectra(k):
    """Singular values in units of c, up to 1000, by name."""
    rng = np.random.default_rng(7)
    half = np.arange(k) < k // 2
    return {
        "gaussian": np.sort(np.abs(rng.normal(size=k)) * np.sqrt(k)),
        "all near c": 1 + 1e-3 * rng.uniform(-1, 1, k),
        "geometric to 10": np.geomspace(1e-4, 10, k),
        "one 30": _rest(30, 0.1, k),
        "one 1000": _rest(1000, 0.1, k),
        "one 1000, a line": np.append(np.linspace(0.5, 1.5, k - 1), 1000),
        "all 0": np.zeros(k),
        "rank 1": _rest(3, 0, k),
        "rank 1, 1000": _rest(1000, 0, k),
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
        "one 100, ones": _rest(100, 1, k),
        "one 999, ones": _rest(999, 1, k),
        "one 500, hundredths": _rest(500, 1e-2, k),
        "uniform to 3": rng.uniform(0, 3, k),
        "uniform to 30": rng.uniform(0, 30, k),
        "uniform to 1000": rng.uniform(0, 1000, k),
        "log-uniform": 10 ** rng.uniform(-3, 3, k),
        "heavy tail": np.minimum(np.abs(rng.standard_cauchy(k)), 1000),
        "log-normal": np.minimum(np.exp(2 * rng.normal(size=k)), 1000),
    }  # fmt: skip


# Far above what float32 resolves: the cap holds there, the rest of the matrix is lost.
# By 1e50 even the square of its rounding is lost.
FAR = {
    "one 1e6": lambda k: _rest(1e6, 0.1, k),
    "one 1e15": lambda k: _rest(1e15, 0.1, k),
    "geometric to 1e6": lambda k: np.geomspace(1e-4, 1e6, k),
    "all 1e6": lambda k: np.full(k, 1e6),
    "all 1e15": lambda k: np.full(k, 1e15),
    "line to 1e4": lambda k: np.linspace(0, 1e4, k),
    "one 1e30": lambda k: _rest(1e30, 0.1, k),
    "all 1e50": lambda k: np.full(k, 1e50),
}


def matrix(rng, values, shape):
    m, n = shape
    k = min(shape)
    u = np.linalg.qr(rng.normal(size=(m, k)))[0]
    v = np.linalg.qr(rng.normal(size=(n, k)))[0]
    return (u * values) @ v.T


def stacked(shape, kinds):
    """float32 matrices, and the scale of each, (b, 1)."""
    rng = np.random.default_rng(3)
    found = [matrix(rng, values, shape) for values in kinds.values()]
    scales = np.resize(SCALES, len(found))
    x = np.stack(found) * scales[:, None, None]
    return x.astype(np.float32), np.float32(scales[:, None])


def exact(x, c, response):
    u, s, vt = np.linalg.svd(np.float64(x), full_matrices=False)
    kept = RESPONSES[response](s / np.float64(c)) * np.float64(c)
    return u * kept[..., None, :] @ vt


@functools.cache
def clip(method, response):
    return helpers.quick_jit(
        functools.partial(F.clip_by_singular_value, method=method, response=response)
    )


def measured(shape, kinds, method, response):
    """By name: how far above c the largest is; the error in the Frobenius norm, relative
    to the exact cap, and in the spectral norm, relative to c.
    """
    x, c = stacked(shape, kinds)
    found = np.float64(clip(method, response)(jnp.asarray(x), jnp.asarray(c)))
    assert np.all(np.isfinite(found))
    want = exact(x, c, response)
    above = np.linalg.norm(found, 2, axis=(1, 2)) / np.float64(c[:, 0]) - 1
    size = np.linalg.norm(want, axis=(1, 2))
    error = np.linalg.norm(found - want, axis=(1, 2)) / np.where(size > 0, size, 1)
    spectral = np.linalg.norm(found - want, 2, axis=(1, 2)) / np.float64(c[:, 0])
    return dict(zip(kinds, zip(above, error, spectral, strict=True), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("method", METHODS)
def test_each_spectrum_is_that_of_the_svd(method, response, shape):
    """Up to 1000 c; products alone are promised it up to 100 c."""
    kinds = spectra(min(shape))
    assert len(kinds) >= 46
    found = measured(shape, kinds, method, response)
    for name, (above, error, spectral) in found.items():
        far = method == "newton_schulz" and np.max(kinds[name]) > 100
        assert above <= (1e-3 if far else 1e-5), (name, above)
        assert error <= (1e-3 if far else 1e-4), (name, error)
        assert far or spectral <= 2e-4, (name, spectral)


@pytest.mark.parametrize("response", RESPONSES)
def test_clip_by_singular_value_of_largest_sides_is_within_promise(response):
    """Half of 128 at 1000 c are the worst that was found."""
    half = np.arange(96) < 48
    kinds = {low: np.where(half, 1000, low) for low in (0.0, 0.9)}
    for above, error, spectral in measured((128, 96), kinds, "eigh", response).values():
        assert above <= 1e-5
        assert error <= 1e-4
        assert spectral <= 2e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_cap_holds_however_large_the_largest_is(method, response, shape):
    kinds = {name: values(min(shape)) for name, values in FAR.items()}
    found = measured(shape, kinds, method, response)
    for name, (above, *_) in found.items():
        assert above <= 1e-3, (name, above)


def _products(jaxpr):
    """How many matrix products it makes, short of what a condition may leave out."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += 1
        elif equation.primitive.name != "cond":
            inner = (getattr(p, "jaxpr", p) for p in equation.params.values())
            made = sum(_products(p) for p in inner if hasattr(p, "eqns"))
            count += made * equation.params.get("length", 1)
    return count


def test_a_cap_by_products_takes_as_many_as_the_help_says():
    """About 65, if the largest singular value is within the window of the threshold."""
    cap = functools.partial(F.clip_by_singular_value, method="newton_schulz")
    assert abs(_products(jax.make_jaxpr(cap)(jnp.ones((4, 6)), 1.0).jaxpr) - 65) <= 2
