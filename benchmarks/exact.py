"""Compute the expected coefficients with NumPy in float64, and the error of a result.

There is one array of coefficients per leaf, which broadcasts to the leaf's shape.
Results are compared on a sample of elements, because all of them would take gigabytes
in float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trees

Arrays = Sequence[np.ndarray]
Factors = Callable[[Arrays, Arrays], Arrays]  # from gradients and parameters

# Threshold over norm. Not a power of two, since scaling by one is always exact.
FRACTION = 0.4
SAMPLE = 1 << 14


def unclipped(gradients: Arrays, params: Arrays) -> Arrays:
    return [np.ones(1)] * len(gradients)


def by(limit: float, norms: Callable[[Arrays], Arrays]) -> Factors:
    return lambda gradients, _: [limit / np.maximum(limit, n) for n in norms(gradients)]


def global_norm(arrays: Arrays) -> Arrays:
    return group_norms(arrays, 1)


def group_norms(arrays: Arrays, count: int) -> Arrays:
    """Return the norm of each leaf's group; leaf `i` is in group `i % count`."""
    norms = [np.array([trees.exact_norm(arrays[i::count])]) for i in range(count)]
    return [norms[i % count] for i in range(len(arrays))]


def leaf_norms(arrays: Arrays) -> Arrays:
    return [np.array([trees.exact_norm([x])]) for x in arrays]


def leaf_rms(arrays: Arrays) -> Arrays:
    return [leaf_norms([x])[0] / np.sqrt(x.size) for x in arrays]


def slice_norms(arrays: Arrays, axis: int) -> Arrays:
    """Return the norms along one axis of each leaf; a vector has a single norm."""
    return [
        np.linalg.norm(
            x.astype(np.float64), axis=axis if x.ndim > 1 else 0, keepdims=True
        )
        for x in arrays
    ]


def magnitudes(arrays: Arrays) -> Arrays:
    return [np.abs(x.astype(np.float64)) for x in arrays]


def by_agc(clipping: float, eps: float = 1e-3) -> Factors:
    """Return the coefficients of AGC: each unit is limited by its parameters' norm."""

    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        norms, limits = (slice_norms(x, axis=0) for x in (gradients, params))
        pairs = zip(norms, limits, strict=True)
        return [np.minimum(1, clipping * np.maximum(p, eps) / n) for n, p in pairs]

    return factors


def places(size: int) -> np.ndarray:
    """Return the indices of sampled elements, evenly spaced; all if there are few."""
    return np.unique(np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64))


def clip_error(source: Arrays, factors: Arrays) -> Callable[[Any], float]:
    """Return a function that computes the largest relative error minus rounding."""
    expected = [_scaled(x, by) for x, by in zip(source, factors, strict=True)]

    def error(tree: Any) -> float:
        worst = 0.0
        for leaf, want in zip(jax.tree.leaves(tree), expected, strict=True):
            finfo = jnp.finfo(leaf.dtype)
            sample = np.asarray(leaf).reshape(-1)[places(leaf.size)].astype(np.float64)
            errors = np.abs(sample - want) / np.maximum(np.abs(want), float(finfo.tiny))
            # A result is rounded to float32 and then to its dtype; the first rounding
            # can turn a value into a tie, so slightly more than half an eps is allowed.
            beyond = np.max(errors) / 1.001 - float(finfo.eps) / 2
            # np.maximum propagates NaN; Python's max may drop it.
            worst = np.maximum(worst, beyond)
        return float(worst)

    return error


def _scaled(array: np.ndarray, factor: np.ndarray) -> np.ndarray:
    at = places(array.size)
    factors = np.broadcast_to(factor, array.shape).flat[at]
    return array.reshape(-1)[at].astype(np.float64) * factors
