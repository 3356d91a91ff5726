"""What each clip should give: its factors by NumPy in float64, and how far a result is off.

Factors are one array for each leaf, of a shape that broadcasts to the leaf's. Results
are compared at a sample of elements, because all of them in float64 take gigabytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trees

Arrays = Sequence[np.ndarray]
Factors = Callable[[Arrays, Arrays], Arrays]  # from gradients and parameters

# Of the norm, so that the clip is active: no power of two, by which scaling is exact.
FRACTION = 0.4
SAMPLE = 1 << 14


def unclipped(gradients: Arrays, params: Arrays) -> Arrays:
    return [np.ones(1)] * len(gradients)


def by(limit: float, norms: Callable[[Arrays], Arrays]) -> Factors:
    return lambda gradients, _: [limit / np.maximum(limit, n) for n in norms(gradients)]


def global_norm(arrays: Arrays) -> Arrays:
    return group_norms(arrays, 1)


def group_norms(arrays: Arrays, count: int) -> Arrays:
    """The norm of each leaf's group; leaves are dealt to the groups in turn."""
    norms = [np.array([trees.exact_norm(arrays[i::count])]) for i in range(count)]
    return [norms[i % count] for i in range(len(arrays))]


def leaf_norms(arrays: Arrays) -> Arrays:
    return [np.array([trees.exact_norm([x])]) for x in arrays]


def leaf_rms(arrays: Arrays) -> Arrays:
    return [leaf_norms([x])[0] / np.sqrt(x.size) for x in arrays]


def slice_norms(arrays: Arrays, axis: int) -> Arrays:
    """The norms along one axis of each leaf, or of a vector as a whole."""
    return [
        np.linalg.norm(
            x.astype(np.float64), axis=axis if x.ndim > 1 else 0, keepdims=True
        )
        for x in arrays
    ]


def magnitudes(arrays: Arrays) -> Arrays:
    return [np.abs(x.astype(np.float64)) for x in arrays]


def by_agc(clipping: float, eps: float = 1e-3) -> Factors:
    """Adaptive gradient clipping: each unit by the norm of its parameters."""

    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        norms, limits = (slice_norms(x, axis=0) for x in (gradients, params))
        pairs = zip(norms, limits, strict=True)
        return [np.minimum(1, clipping * np.maximum(p, eps) / n) for n, p in pairs]

    return factors


def places(size: int) -> np.ndarray:
    """The indices of the elements to look at: all, or some from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64))


def clip_error(source: Arrays, factors: Arrays) -> Callable[[Any], float]:
    """The largest relative error of sampled elements, beyond one rounding."""
    wanted = [_scaled(x, by) for x, by in zip(source, factors, strict=True)]

    def error(tree: Any) -> float:
        worst = 0.0
        for got, want in zip(jax.tree.leaves(tree), wanted, strict=True):
            finfo = jnp.finfo(got.dtype)
            taken = np.asarray(got).reshape(-1)[places(got.size)].astype(np.float64)
            off = np.abs(taken - want) / np.maximum(np.abs(want), float(finfo.tiny))
            # Rounded from float32, so twice in all: the second may tip a tie.
            beyond = np.max(off) / 1.001 - float(finfo.eps) / 2
            # Unlike Python's max, which may drop a NaN.
            worst = np.maximum(worst, beyond)
        return float(worst)

    return error


def _scaled(array: np.ndarray, factor: np.ndarray) -> np.ndarray:
    at = places(array.size)
    factors = np.broadcast_to(factor, array.shape).flat[at]
    return array.reshape(-1)[at].astype(np.float64) * factors
