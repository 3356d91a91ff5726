"""Measure the leaves of a gradient and of the parameters, and their slices."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves
from ._explanation import Leaf, Outlier, Slice
from ._recorded import LEAF, Numbers

# Trained embeddings have rows of some times the median, and layers differ in scale.
_MOST_OF_SLICES = 30
_MOST_OF_LEAVES = 100
# A median of fewer says nothing about an outlier.
_FEWEST = 3


class Size(NamedTuple):
    """Hold the norm of a leaf and those of its slices.

    Attributes:
      norm: L2 norm of the leaf; NaN or inf if an element is not finite.
      slices: For each axis, the norm of each slice.
      shape: Shape of the leaf; a scalar has one axis.
    """

    norm: float
    slices: list[np.ndarray]
    shape: tuple[int, ...]


def sizes_of(leaves: list[jax.Array]) -> list[Size]:
    """Return the sizes of leaves, with the sums over slices in float64."""
    return [_size(x.shape, *_sums(jnp.atleast_1d(x))) for x in leaves]


def _size(shape: tuple[int, ...], scale: jax.Array, sums: list[jax.Array]) -> Size:
    squares, unit = [np.asarray(x, np.float64) for x in sums], float(scale)
    # Fewest elements are summed on the device along the longest axis.
    norm = unit * float(np.sqrt(np.sum(max(squares, key=len))))
    return Size(norm, [unit * np.sqrt(x) for x in squares], shape or (1,))


# Compiled once for all leaves of a shape.
@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Return the largest element of a leaf, and sums of squares relative to it."""
    size = jnp.abs(_leaves.widen(x))
    finite = jnp.where(jnp.isfinite(size), size, 0)
    largest = jnp.max(finite, initial=0.0)
    # Squares of numbers above 1e19 or below 1e-23 would leave the range of float32.
    scale = jnp.where(largest > 0, largest, 1)
    squares = (size / scale) ** 2
    axes = range(x.ndim)
    return scale, [jnp.sum(squares, axis=[b for b in axes if b != a]) for a in axes]


def leaves_of(names: list[str], sizes: list[Size], usual: Numbers) -> list[Leaf]:
    """Return all leaves, largest first; by their ratio to usual norms if any is known.

    Leaves with NaN or inf are first, leaves without a usual norm last.
    """
    norms = np.array([size.norm for size in sizes])
    with np.errstate(over="ignore", invalid="ignore"):
        relative = norms / (np.max(norms, where=np.isfinite(norms), initial=0) or 1)
        fractions = relative**2 / (np.sum(relative**2) or 1)
    medians = [usual.get((LEAF, name)) for name in names]
    leaves = [
        Leaf(name, s.norm, float(fraction), _slice(s), median and s.norm / median)
        for name, s, fraction, median in zip(
            names, sizes, fractions, medians, strict=True
        )
    ]
    unknown = np.inf if any(medians) else 1.0
    order = [s.norm / (m or unknown) for s, m in zip(sizes, medians, strict=True)]
    order = np.nan_to_num(order, nan=np.inf, posinf=np.inf)
    return [leaves[i] for i in np.argsort(-order, kind="stable")]


def _slice(size: Size) -> Slice | None:
    """Return the slice that exceeds its equal part of the leaf the most."""
    if not 0 < size.norm < np.inf:
        return None
    slices = [
        Slice(axis, index, float((norms[index] / size.norm) ** 2), size.shape)
        for axis, norms in enumerate(size.slices)
        for index in [int(np.argmax(norms))]
        if len(norms) > 1
    ]
    return max(slices, key=lambda s: s.fraction * s.length, default=None)


def outliers_of(names: list[str], sizes: list[Size]) -> list[Outlier]:
    """Return slices of over 30 times their median, leaves of over 100; largest first.

    Only leaves with two axes or more are compared: biases and scales vary widely.
    """
    matrices = [
        (name, size)
        for name, size in zip(names, sizes, strict=True)
        if len(size.slices) > 1 and np.isfinite(size.norm)
    ]
    outliers = [
        Outlier(name, size.shape, axis, *outlier)
        for name, size in matrices
        for axis, norms in enumerate(size.slices)
        for outlier in _above(norms, _MOST_OF_SLICES)
    ]
    counts = [max(math.prod(size.shape), 1) for _, size in matrices]
    rms = np.array([size.norm for _, size in matrices]) / np.sqrt(counts)
    outliers += [
        Outlier(matrices[i][0], matrices[i][1].shape, None, None, ratio)
        for i, ratio in _above(rms, _MOST_OF_LEAVES)
    ]
    return sorted(outliers, key=lambda outlier: -outlier.ratio)


def _above(sizes: np.ndarray, most: float) -> list[tuple[int, float]]:
    """Return the index and ratio of sizes that exceed `most` times their median."""
    median = np.median(sizes) if len(sizes) >= _FEWEST else 0.0
    if median == 0:
        return []
    ratios = sizes / median
    return [(int(i), float(ratios[i])) for i in np.flatnonzero(ratios > most)]
