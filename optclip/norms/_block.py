"""Define `Block`, the elements that share a norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optclip._arrays import _axis_names, _leaves, _validate
from optclip._arrays._types import Leaf


@dataclasses.dataclass(frozen=True)
class Block:
    """Group the leaves that share a norm, or with `axis` the slices of one leaf.

    Args:
      leaves: List of arrays or BCOO matrices.
      axis: Axes that each norm of a single leaf covers, counted from 0; `()` for each
        element. Default: None, one norm of all leaves.
    """

    leaves: Sequence[Leaf]
    axis: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        advice = "Wrap a single leaf in a list."
        _validate.kind("leaves", self.leaves, (list, tuple), "a list of arrays", advice)
        if self.axis is None:
            return
        is_valid = isinstance(self.axis, tuple) and len(self.leaves) == 1
        if not is_valid or not all(type(a) is int and a >= 0 for a in self.axis):
            wanted = "None, or with a single leaf a tuple of ints counted from 0"
            advice = f"Leaves in the block: {len(self.leaves)}."
            raise TypeError(_validate.must_be("axis", wanted, self.axis, advice))


def declared_across(block: Block) -> _axis_names.Declared:
    """Return the mapped axes that split the norms of a block, as far as declared."""
    if block.axis is None:
        return _axis_names.Declared()
    declared = _leaves.axis_name_of(block.leaves[0])
    return _axis_names.Declared(
        _axis_names.declared_across_slices(block.axis, declared)
    )
