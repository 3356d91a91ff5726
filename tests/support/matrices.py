"""Build matrices with given singular values."""

import numpy as np


def matrix(rng, values, shape):
    """Return a random float64 matrix with these singular values."""
    m, n = shape
    k = min(shape)
    u = np.linalg.qr(rng.normal(size=(m, k)))[0]
    v = np.linalg.qr(rng.normal(size=(n, k)))[0]
    return (u * values) @ v.T
