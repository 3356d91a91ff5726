"""Find parameters of unusual size, which the norms of gradients do not show."""

from __future__ import annotations

import numpy as np

from ._entries import Outlier
from ._sizes import Size

# Trained embeddings have rows of some times the median, and layers differ in scale.
_MOST_OF_SLICES = 30
_MOST_OF_LEAVES = 100
# A median of fewer says nothing about an outlier.
_FEWEST = 3


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
    rms = np.array([size.rms for _, size in matrices])
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
