"""Compute errors of derivatives of singular-value clipping, with large values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip import functional as F
from tests.support.matrices import matrix

SHAPES = [(24, 40), (40, 24), (24, 24), (8, 300)]
DTYPES = ["float32", "complex64"]

# f and its derivative at threshold 1, and the derivative with respect to the threshold.
HARD = (
    lambda s: np.minimum(s, 1.0),
    lambda s: np.where(s > 1, 0.0, 1.0),
    lambda s: np.where(s > 1, 1.0, 0.0),
)
SMOOTH = (
    lambda s: s / np.sqrt(1 + s**2),
    lambda s: (1 + s**2) ** -1.5,
    lambda s: s**3 * (1 + s**2) ** -1.5,
)
POLAR = np.sign, np.zeros_like, np.sign
CAPS = {"hard": HARD, "smooth": SMOOTH, "normalize": POLAR}

# The documented error, relative to the norm of the exact derivative.
ROOM = 5e-5


def exact(x: np.ndarray, dx: np.ndarray, cap: str) -> np.ndarray:
    """Return the derivative of u f(s) v^* along dx, in float64."""
    f, slope, _ = CAPS[cap]
    m, n = x.shape
    if m > n:
        return exact(x.T, dx.T, cap).T
    wide, more = (np.pad(a, ((0, n - m), (0, 0))) for a in (x, dx))
    u, s, vt = np.linalg.svd(wide)
    inner = u.conj().T @ more @ vt.conj().T
    a, b = s[:, None], s[None, :]
    equal = np.abs(a - b) < 1e-9
    minus = np.where(equal, slope(a) + 0 * b, (f(a) - f(b)) / np.where(equal, 1, a - b))
    total = np.where(a + b > 1e-9, a + b, 1)
    plus = np.where(a + b > 1e-9, (f(a) + f(b)) / total, slope(0.0))
    even, odd = (inner + inner.conj().T) / 2, (inner - inner.conj().T) / 2
    return (u @ (minus * even + plus * odd) @ vt)[:m]


def beside_spikes(k: int) -> dict[str, np.ndarray]:
    """Return spectra in units of the threshold, with no value at the kink."""
    half = np.arange(k) < k // 2
    return {
        "one 30": np.append(np.full(k - 1, 0.1), 30),
        "one 100": np.append(np.full(k - 1, 0.1), 100),
        "one 1000": np.append(np.full(k - 1, 0.1), 1000),
        "one 1000, a line": np.append(np.linspace(0.5, 1.63, k - 1), 1000),
        "half 1000": np.where(half, 1000, 0.01),
        "half the rank, 1000": np.where(half, 1000, 0),
        "geometric to 7": np.geomspace(7e-5, 7, k),
        "geometric to 700": np.geomspace(7e-3, 700, k),
        "geometric, all above": np.geomspace(2, 1000, k),
        "ties": np.where(half, 5, 0.5),
        "gaussian": np.abs(np.random.default_rng(1).normal(size=k)) * np.sqrt(k),
    }


def errors(
    cap: str, shape: tuple[int, int], dtype: str, jit: Callable[..., Any] = jax.jit
) -> dict[str, float]:
    """Return, per spectrum, the larger of the forward- and reverse-mode errors.

    Forward mode: along a random direction, relative to the derivative's Frobenius norm.
    Reverse mode: of a weighted sum, relative to that norm times the norm of the
    weights.
    """
    rng = np.random.default_rng(2)
    kinds = beside_spikes(min(shape))
    x = np.stack([matrix(rng, values, shape) for values in kinds.values()])
    along, weights = rng.normal(size=(2, *x.shape))
    if dtype == "complex64":
        # A unitary diagonal preserves the singular values.
        x = x * np.exp(2j * np.pi * rng.uniform(size=shape[1]))
        along = along + 1j * rng.normal(size=x.shape)
    x, along = x.astype(dtype), along.astype(dtype)
    clip = functools.partial(F.clip_by_singular_value, response=cap)

    def one(x, along, weights):
        _, forward = jax.jvp(lambda x: clip(x, 1.0), (x,), (along,))
        by_x = jax.grad(lambda x: jnp.sum(weights * jnp.real(clip(x, 1.0))))(x)
        return forward, by_x

    with jax.numpy_dtype_promotion("strict"):
        forward, by_x = jit(jax.vmap(one))(x, along, np.float32(weights))
    largest = {}
    for i, name in enumerate(kinds):
        want = exact(x[i].astype(complex), along[i].astype(complex), cap)
        size = np.linalg.norm(want)
        # JAX conjugates the gradient of a real function of complex numbers.
        reverse = np.sum(np.real(np.complex128(by_x[i]) * along[i]))
        want_reverse = np.sum(weights[i] * np.real(want))
        relative = [
            np.linalg.norm(forward[i] - want) / size,
            abs(reverse - want_reverse) / (size * np.linalg.norm(weights[i])),
        ]
        largest[name] = float(np.max(relative))
    return largest
