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


def by_global_norm(limit: float) -> Factors:
    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        norm = trees.exact_norm(gradients)
        return [np.full(1, min(1.0, limit / norm))] * len(gradients)

    return factors


def by_leaf(limit: float, *, mean: bool = False) -> Factors:
    """By the norm of each leaf, or by its root mean square."""

    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        sizes = [x.size if mean else 1 for x in gradients]
        norms = [trees.exact_norm([x]) for x in gradients]
        pairs = zip(norms, sizes, strict=True)
        return [np.minimum(1, limit / (n / np.sqrt([size]))) for n, size in pairs]

    return factors


def by_last_axis(limit: float) -> Factors:
    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        norms = [slice_norms(x, -1) for x in gradients]
        return [np.minimum(1, limit / norm) for norm in norms]

    return factors


def by_group(limit: float, count: int) -> Factors:
    """Leaves are dealt to the groups in turn."""

    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        norms = [trees.exact_norm(gradients[i::count]) for i in range(count)]
        found = [np.full(1, min(1.0, limit / norm)) for norm in norms]
        return [found[i % count] for i in range(len(gradients))]

    return factors


def by_agc(clipping: float, eps: float = 1e-3) -> Factors:
    """Adaptive gradient clipping: each unit by the norm of its parameters."""

    def factors(gradients: Arrays, params: Arrays) -> Arrays:
        found = []
        for g, p in zip(gradients, params, strict=True):
            limit, norm = (slice_norms(x, 0 if x.ndim > 1 else None) for x in (p, g))
            found.append(np.minimum(1, clipping * np.maximum(limit, eps) / norm))
        return found

    return factors


def slice_norms(array: np.ndarray, axis: int | None) -> np.ndarray:
    """L2 norms in float64 that broadcast to the array, part by part to spare memory."""
    other = 1 if axis == 0 else 0
    parts = np.array_split(array, 1 + array.size // (1 << 22), axis=other)
    if axis is None or array.ndim == 1:
        return np.array([trees.exact_norm(parts)])
    norms = [
        np.linalg.norm(part.astype(np.float64), axis=axis, keepdims=True)
        for part in parts
    ]
    return np.concatenate(norms, axis=other)


def places(size: int, count: int = SAMPLE) -> np.ndarray:
    """Which elements of so many to look at: all, or some from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, count)).astype(np.int64))


def scaled(array: np.ndarray, factor: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Elements of a leaf times their factors, in float64."""
    factors = np.broadcast_to(factor, array.shape).flat[at]
    return array.reshape(-1)[at].astype(np.float64) * factors


def clip_error(source: Arrays, factors: Arrays) -> Callable[[Any], float]:
    """How far a clipped tree is off, relative to each element."""
    pairs = zip(source, factors, strict=True)
    wanted = [scaled(x, factor, places(x.size)) for x, factor in pairs]
    return elements_error(wanted)


def clipped_values(source: Arrays, limit: float) -> Arrays:
    """The sampled elements clipped one by one."""
    samples = [scaled(x, np.ones(1), places(x.size)) for x in source]
    return [np.clip(x, -limit, limit) for x in samples]


def elements_error(wanted: Arrays) -> Callable[[Any], float]:
    """The largest relative error of the sampled elements, beyond one rounding."""

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
