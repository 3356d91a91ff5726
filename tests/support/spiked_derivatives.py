"""Compute derivatives of functions of singular values, and build large values."""

import numpy as np

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
