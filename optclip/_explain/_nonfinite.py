"""Find NaN and inf, and the examples that make them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._attribution import example_norms
from ._sizes import Size
from ._step import Step


class Nonfinite(NamedTuple):
    """Hold the places of NaN and inf; see `Explanation`."""

    losses: list[tuple[int, ...]]
    examples: list[int]
    leaves: list[str]
    params: list[str]

    @property
    def is_in_gradient(self) -> bool:
        return bool(self.losses or self.leaves)


def found_in(
    step: Step, losses: np.ndarray, grads: list[Size], params: list[Size]
) -> Nonfinite:
    """Return the losses, examples and leaves that are not finite."""
    places = [tuple(map(int, place)) for place in np.argwhere(~np.isfinite(losses))]
    leaves, of_params = _named(step, grads), _named(step, params)
    examples = _examples(step, places) if places or leaves else []
    return Nonfinite(places, examples, leaves, of_params)


def _examples(step: Step, places: list[tuple[int, ...]]) -> list[int]:
    """Return the examples whose loss or gradient is not finite.

    A batch that cannot be split has gradients of the whole batch only, so that these
    examples are found by their losses.
    """
    examples = {place[0] for place in places}
    if step.can_be_split():
        examples |= {*np.flatnonzero(~np.isfinite(example_norms(step))).tolist()}
    return sorted(examples)


def _named(step: Step, sizes: list[Size]) -> list[str]:
    pairs = zip(step.names, sizes, strict=True)
    return [name for name, size in pairs if not np.isfinite(size.norm)]
