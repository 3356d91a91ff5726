"""Measure leaves and their slices along each axis."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves


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

    @property
    def rms(self) -> float:
        return self.norm / np.sqrt(max(math.prod(self.shape), 1))


def sizes_of(leaves: list[jax.Array]) -> list[Size]:
    """Return the sizes of leaves, with the sums over slices in float64."""
    return [
        _size(x, scale, sums)
        for x, (scale, sums) in zip(leaves, _sums(leaves), strict=True)
    ]


def _size(leaf: jax.Array, scale: jax.Array, sums: list[jax.Array]) -> Size:
    squares = [np.asarray(x, np.float64) for x in sums]
    unit = float(scale)
    # Fewest elements are summed on the device along the longest axis.
    norm = unit * float(np.sqrt(np.sum(max(squares, key=len))))
    return Size(norm, [unit * np.sqrt(x) for x in squares], leaf.shape or (1,))


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[tuple[jax.Array, list[jax.Array]]]:
    """Return the largest element of each leaf, and sums of squares relative to it."""
    return [_sums_of(jnp.atleast_1d(x)) for x in leaves]


def _sums_of(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    size = jnp.abs(_leaves.widen(x))
    finite = jnp.where(jnp.isfinite(size), size, 0)
    largest = jnp.max(finite, initial=0.0)
    # Squares of numbers above 1e19 or below 1e-23 would leave the range of float32.
    scale = jnp.where(largest > 0, largest, 1)
    squares = (size / scale) ** 2
    axes = range(x.ndim)
    return scale, [jnp.sum(squares, axis=[b for b in axes if b != a]) for a in axes]
