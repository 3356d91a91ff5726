"""Which leaves of a tree are clipped on the way back, kept by path."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from optclip._arrays import _axis_names, _leaves, _packed_state, _prefix, _validate
from optclip._arrays._types import AxisName, Mask, PyTree
from optclip.typing import CotangentRecord


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The leaves of a tree whose cotangents are clipped; the others stay as they are.

    Attributes:
      flat: the whole tree.
      are_chosen: for each leaf whether it is clipped.
    """

    flat: _leaves.Flat
    are_chosen: list[bool]

    @property
    def arrays(self) -> PyTree:
        """The arrays by path, or the one array; None for those that stay."""
        return self._keyed(self.flat.leaves)

    def by_name(self) -> list[tuple[str, Any]]:
        """Return the name in errors and the array of each clipped leaf."""
        names = map(_leaves.named, self.flat.paths)
        leaves = zip(names, self.flat.leaves, self.are_chosen, strict=True)
        return [(name, leaf) for name, leaf, is_chosen in leaves if is_chosen]

    def spread(self, name: str, threshold: PyTree) -> PyTree:
        """A threshold for each of these arrays, in the same structure."""
        places = self.flat.rebuild(list(range(len(self.are_chosen))))
        filled = _prefix.fill(name, threshold, places)
        return self._keyed(self.flat.treedef.flatten_up_to(filled))

    def axis_names(self, axis_name: AxisName | None) -> PyTree:
        """The mapped axes declared for each, in the same structure."""
        _axis_names.check(axis_name)
        return self._keyed(_axis_names.by_leaf(axis_name, self.flat))

    def rebuild(self, arrays: PyTree) -> PyTree:
        """The tree, with these arrays in their places."""
        is_one = not isinstance(self.arrays, dict)
        replacements = iter([arrays] if is_one else [arrays[k] for k in self.arrays])
        pairs = zip(self.flat.leaves, replacements, self.are_chosen, strict=True)
        return self.flat.rebuild(
            [new if is_chosen else old for old, new, is_chosen in pairs]
        )

    def _keyed(self, entries: list[Any]) -> PyTree:
        pairs = zip(entries, self.are_chosen, strict=True)
        chosen = [entry if is_chosen else None for entry, is_chosen in pairs]
        return _packed_state.keyed(self.flat.treedef, chosen)


def _is_record(value: Any) -> bool:
    return isinstance(value, CotangentRecord)


def chosen_leaves(tree: PyTree, mask: Mask | None) -> Chosen:
    """The floating-point arrays of a tree that a mask takes.

    Raises:
      TypeError: a leaf is not an array or a number, or is a sparse matrix; a probe is
        among them.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_record)
    if any(map(_is_record, leaves)):
        advice = "With `probe` a pair is returned: h, probe = clip_cotangent(...)."
        raise TypeError(_validate.must_be("tree", "without a probe", tree, advice))
    flat = _leaves.flatten(tree)
    live = flat.clippable()
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if _leaves.is_sparse(leaf):
            subject = _leaves.named(path, "The")
            advice = "Clip the cotangent of its data."
            raise TypeError(_validate.must_be(subject, "a dense array", leaf, advice))
    in_mask = _prefix.spread_mask("mask", mask, flat, live)
    return Chosen(
        flat,
        [
            is_live and is_taken and hasattr(leaf, "shape")
            for leaf, is_live, is_taken in zip(flat.leaves, live, in_mask, strict=True)
        ],
    )
