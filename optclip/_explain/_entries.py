"""Hold the entries of an explanation, and select those that stand out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Slice(NamedTuple):
    """Hold the largest slice of a leaf.

    Attributes:
      axis: Axis of the leaf.
      at: Index on this axis.
      fraction: Fraction of the squared norm of the leaf.
      shape: Shape of the leaf.
    """

    axis: int
    at: int
    fraction: float
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    def __str__(self) -> str:
        return _words(self.axis, self.at, self.shape)


class Leaf(NamedTuple):
    """Hold the gradient of a leaf.

    Attributes:
      name: Path of the leaf.
      norm: Norm of its gradient.
      fraction: Fraction of the squared norm of the whole gradient.
      slice: Largest slice, or None if it has none.
      ratio: Norm divided by its median in the history, or None without one.
    """

    name: str
    norm: float
    fraction: float
    slice: Slice | None
    ratio: float | None


class Contribution(NamedTuple):
    """Hold what an example, a position or a single loss contributes to the gradient.

    Attributes:
      example: Index of the example, or None for all.
      position: Index of the position, or None for all.
      fraction: Fraction of the gradient.
      loss: Loss, averaged over examples or positions.
    """

    example: int | None
    position: int | None
    fraction: float
    loss: float

    def __str__(self) -> str:
        example = None if self.example is None else f"example {self.example}"
        position = None if self.position is None else f"position {self.position}"
        return " of ".join(filter(None, [position, example]))


class Outlier(NamedTuple):
    """Hold parameters of unusual size.

    Attributes:
      name: Path of the leaf.
      shape: Its shape.
      axis: Axis of the slice, or None for the whole leaf.
      at: Index on this axis, or None for the whole leaf.
      ratio: Norm divided by the median of all slices of this axis; for a leaf, root
        mean square divided by the median of all leaves with two axes or more.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None
    at: int | None
    ratio: float

    def __str__(self) -> str:
        if self.axis is None or self.at is None:
            return named(self.name)
        return f"{_words(self.axis, self.at, self.shape)} of {named(self.name)}"


def named(name: str) -> str:
    """Return the name of a leaf in a sentence."""
    return f"`{name}`" if name else "the array"


def _words(axis: int, index: int, shape: tuple[int, ...]) -> str:
    """Return the words for a slice of a leaf."""
    if len(shape) <= 2:
        return f"{('row', 'column')[axis] if len(shape) == 2 else 'element'} {index}"
    return f"index {index} of axis {axis}"


def standing_out(fractions: np.ndarray) -> int | None:
    """Return the index of the entry with over half of the total, or None.

    It must also have over twice its equal part, since one of two entries always has
    half. Opposing entries count by their size.
    """
    sizes = np.abs(np.ravel(fractions))
    if not sizes.size or not np.all(np.isfinite(sizes)):
        return None
    index = int(np.argmax(sizes))
    least = max(0.5, 2 / sizes.size) * np.sum(sizes)
    return index if sizes[index] > least else None


def largest(fractions: np.ndarray, top: int) -> list[int]:
    """Return the indices of the largest entries, in order."""
    order = np.argsort(-np.abs(np.ravel(fractions)), kind="stable")
    return order[:top].tolist()
