"""Sum what each loss contributes over examples and positions, and select from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._entries import Contribution, largest, standing_out


class Table(NamedTuple):
    """Hold contributions, one per row.

    Attributes:
      fractions: Fraction of the gradient.
      losses: Loss, averaged over examples or positions.
      examples: Index of the example, or None for all.
      positions: Index of the position, or None for all.
    """

    fractions: np.ndarray
    losses: np.ndarray
    examples: np.ndarray | None
    positions: np.ndarray | None

    def entry(self, i: int) -> Contribution:
        example = None if self.examples is None else int(self.examples[i])
        position = None if self.positions is None else int(self.positions[i])
        loss = float(self.losses[i])
        return Contribution(example, position, float(self.fractions[i]), loss)

    def largest(self, top: int) -> list[Contribution]:
        return [self.entry(i) for i in largest(self.fractions, top)]

    def standing_out(self) -> Contribution | None:
        index = standing_out(self.fractions)
        return None if index is None else self.entry(index)


class Tables(NamedTuple):
    """Hold the contributions by single loss, by example and by position."""

    losses: Table
    examples: Table
    positions: Table


def tables_of(fractions: np.ndarray | None, losses: np.ndarray) -> Tables:
    """Return the contributions; a table without rows where there are none.

    Args:
      fractions: Fractions of the losses, or of the examples alone, or None.
      losses: Losses, `(batch,)` or `(batch, positions)`.
    """
    nothing = Table(np.zeros(0), np.zeros(0), None, None)
    if fractions is None:
        return Tables(nothing, nothing, nothing)
    examples = np.arange(len(losses))
    if fractions.ndim == 1:
        means = losses.reshape(len(losses), -1).mean(1)
        return Tables(nothing, Table(fractions, means, examples, None), nothing)
    rows, columns = np.indices(fractions.shape)
    positions = np.arange(fractions.shape[1])
    return Tables(
        Table(fractions.ravel(), losses.ravel(), rows.ravel(), columns.ravel()),
        Table(fractions.sum(1), losses.mean(1), examples, None),
        Table(fractions.sum(0), losses.mean(0), None, positions),
    )
