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
_MOST_OF_SLICES, _MOST_OF_LEAVES = 30, 100
# A median of fewer says nothing about an outlier.
_FEWEST = 3
# Norms below this part of the largest one are rounding errors.
_NOISE = 1e-6


class Size(NamedTuple):
    """Hold the norm of a leaf and those of its slices.

    Attributes:
      name: Path of the leaf.
      norm: L2 norm of the leaf; NaN or inf if an element is not finite.
      slices: For each axis, the norm of each slice.
      shape: Shape of the leaf; a scalar has one axis.
    """

    name: str
    norm: float
    slices: list[np.ndarray]
    shape: tuple[int, ...]


def sizes_of(names: list[str], leaves: list[jax.Array]) -> list[Size]:
    """Return the sizes of leaves, with the sums over slices in float64."""
    pairs = zip(names, leaves, strict=True)
    return [_size(name, x.shape, *_sums(jnp.atleast_1d(x))) for name, x in pairs]


def _size(
    name: str, shape: tuple[int, ...], scale: jax.Array, sums: list[jax.Array]
) -> Size:
    squares, unit = [np.asarray(x, np.float64) for x in sums], float(scale)
    # Fewest elements are summed on the device along the longest axis.
    norm = unit * float(np.sqrt(np.sum(max(squares, key=len))))
    return Size(name, norm, [unit * np.sqrt(x) for x in squares], shape or (1,))


# Compiled once for all leaves of a shape.
@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Return the largest element of a leaf, and sums of squares relative to it."""
    size = jnp.abs(_leaves.widen(x))
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0.0)
    # Squares of numbers above 1e19 or below 1e-23 would leave the range of float32.
    scale = jnp.where(largest > 0, largest, 1)
    squares = (size / scale) ** 2
    axes = range(x.ndim)
    return scale, [jnp.sum(squares, axis=[b for b in axes if b != a]) for a in axes]


def leaves_of(sizes: list[Size], usual: Numbers) -> list[Leaf]:
    """Return all leaves, largest first; by their ratio to usual norms if any is known.

    Leaves with NaN or inf are first, leaves without a usual norm last. Rounding errors,
    such as the gradient of the bias of keys, have none.
    """
    norms = np.array([size.norm for size in sizes])
    with np.errstate(over="ignore", invalid="ignore"):
        relative = norms / (np.max(norms, where=np.isfinite(norms), initial=0) or 1)
        fractions = relative**2 / (np.sum(relative**2) or 1)
        medians = np.array([usual.get((LEAF, s.name), np.inf) for s in sizes])
        medians[relative < _NOISE] = np.inf
        is_known = np.isfinite(medians)
        ratios = norms / medians
    leaves = [
        Leaf(size.name, size.norm, fraction, _slice(size), ratio if known else None)
        for size, fraction, ratio, known in zip(
            sizes, fractions.tolist(), ratios.tolist(), is_known, strict=True
        )
    ]
    order = ratios if is_known.any() else norms
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
    return max(slices, key=lambda s: s.fraction * s.shape[s.axis], default=None)


def outliers_of(sizes: list[Size]) -> list[Outlier]:
    """Return slices of over 30 times their median, leaves of over 100; largest first.

    Only leaves with two axes or more are compared: biases and scales vary widely.
    """
    matrices = [s for s in sizes if len(s.slices) > 1 and np.isfinite(s.norm)]
    rms = [s.norm / np.sqrt(max(math.prod(s.shape), 1)) for s in matrices]
    outliers = [
        Outlier(matrices[i].name, matrices[i].shape, None, None, ratio)
        for i, ratio in _above(np.array(rms), _MOST_OF_LEAVES)
    ]
    outliers += [
        Outlier(size.name, size.shape, axis, *outlier)
        for size in matrices
        for axis, norms in enumerate(size.slices)
        for outlier in _above(norms, _MOST_OF_SLICES)
    ]
    return sorted(outliers, key=lambda outlier: -outlier.ratio)


def _above(sizes: np.ndarray, most: float) -> list[tuple[int, float]]:
    """Return the index and ratio of sizes that exceed `most` times their median."""
    median = np.median(sizes) if len(sizes) >= _FEWEST else 0.0
    ratios = sizes / (median or np.inf)
    return [(int(i), float(ratios[i])) for i in np.flatnonzero(ratios > most)]
