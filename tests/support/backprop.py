"""Implement back-propagation with cotangent clipping in NumPy float64.

The network is `h_t = tanh(h_(t-1) W + x_t)` and the loss `sum(h_T * target)`. Clipping
applies to the whole cotangent of `h_t`, from later steps and from the loss.
"""

from collections.abc import Callable

import numpy as np

Clip = Callable[[np.ndarray], np.ndarray]


def recurrent(w: np.ndarray, xs: np.ndarray, target: np.ndarray, clip: Clip):
    """Return the gradient with respect to `w`, and the cotangents before clipping."""
    hs = [np.zeros(xs.shape[1:])]
    for x in xs:
        hs.append(np.tanh(hs[-1] @ w + x))
    gradient, g, cotangents = np.zeros_like(w), target, []
    for before, now in zip(hs[-2::-1], hs[:0:-1], strict=True):
        cotangents.append(g)
        inner = clip(g) * (1 - now**2)
        gradient += before.T @ inner
        g = inner @ w.T
    return gradient, cotangents


def scaled(response: Callable[[np.ndarray, np.ndarray], np.ndarray]):
    """Return a factory of per-row clipping with this response."""

    def make(threshold: float, axis=-1) -> Clip:
        def clip(g: np.ndarray) -> np.ndarray:
            norm = np.sqrt(np.sum(np.abs(g) ** 2, axis=axis, keepdims=True))
            safe = np.where(norm > 0, norm, 1)
            return g * np.where(norm > 0, response(safe, threshold), 1)

        return clip

    return make


hard = scaled(lambda n, c: np.minimum(1, c / n))
smooth = scaled(lambda n, c: 1 / np.sqrt(1 + (n / c) ** 2))
drop = scaled(lambda n, c: np.where(n > c, 0.0, 1.0))
normalize = scaled(lambda n, c: c / n)


def by_value(threshold: float) -> Clip:
    """Graves 2013, section 2.1; Lasagne's `grad_clipping`."""
    return lambda g: np.clip(g, -threshold, threshold)
