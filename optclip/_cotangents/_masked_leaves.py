"""Select the leaves whose cotangents are clipped, keyed by path."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._arrays import _axis_names, _leaves, _packed_state, _prefix, _validate
from .._arrays._types import AxisName, Mask, PyTree
from .._typing import is_cotangent_record


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Hold a tree and which of its leaves have clipped cotangents.

    Attributes:
      flat: the whole tree.
      are_chosen: for each leaf whether it is clipped.
    """

    flat: _leaves.Flat
    are_chosen: list[bool]

    @property
    def arrays(self) -> PyTree:
        """Return the clipped arrays by path, or the only array, with None elsewhere."""
        return self._keyed(self.flat.leaves)

    def by_name(self) -> list[tuple[str, Any]]:
        """Return the name in errors and the array of each clipped leaf."""
        names = map(_leaves.named, self.flat.paths)
        leaves = zip(names, self.flat.leaves, self.are_chosen, strict=True)
        return [(name, leaf) for name, leaf, is_chosen in leaves if is_chosen]

    def spread(self, name: str, threshold: PyTree) -> PyTree:
        """Return a threshold for each of `arrays`, in its structure."""
        places = self.flat.rebuild(list(range(len(self.are_chosen))))
        filled = _prefix.fill(name, threshold, places)
        return self._keyed(self.flat.treedef.flatten_up_to(filled))

    def axis_names(self, axis_name: AxisName | None) -> PyTree:
        """Return the mapped axes declared for each of `arrays`, in its structure."""
        _axis_names.check(axis_name)
        return self._keyed(_axis_names.by_leaf(axis_name, self.flat))

    def rebuild(self, arrays: PyTree) -> PyTree:
        """Return the tree with the clipped leaves replaced by `arrays`."""
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


def chosen_leaves(tree: PyTree, mask: Mask | None) -> Chosen:
    """Select the floating-point arrays of a tree that are in the mask.

    Raises:
      TypeError: A leaf is a sparse matrix, or neither an array nor a number; or the
        tree contains a probe.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_cotangent_record)
    if any(map(is_cotangent_record, leaves)):
        wanted = "a tree without a probe"
        advice = "With `probe`, unpack the result: h, probe = clip_cotangent(...)."
        raise TypeError(_validate.must_be("tree", wanted, tree, advice))
    flat = _leaves.flatten(tree)
    live = flat.clippable()
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if _leaves.is_sparse(leaf):
            subject = _leaves.named(path, "The")
            advice = "Pass its data, and rebuild the sparse array from the result."
            raise TypeError(_validate.must_be(subject, "a dense array", leaf, advice))
    in_mask = _prefix.spread_mask("mask", mask, flat, live)
    return Chosen(
        flat,
        [
            is_live and is_taken and hasattr(leaf, "shape")
            for leaf, is_live, is_taken in zip(flat.leaves, live, in_mask, strict=True)
        ],
    )
