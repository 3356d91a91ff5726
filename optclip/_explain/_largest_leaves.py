"""Select the leaves with the largest gradients, and the slices that hold them."""

from __future__ import annotations

import numpy as np

from .._monitor import parts_in, read
from .._typing import History
from ._entries import Leaf, Slice, largest
from ._sizes import Size


def leaves_of(
    names: list[str], sizes: list[Size], medians: dict[str, float] | None
) -> list[Leaf]:
    """Return all leaves, largest first; by their ratio to the history if there is one.

    Leaves with NaN or inf are first.
    """
    norms = np.array([size.norm for size in sizes])
    squares = (norms / (np.max(norms, where=np.isfinite(norms), initial=0) or 1)) ** 2
    total = np.sum(squares) or 1.0
    leaves = [
        Leaf(name, size.norm, float(square / total), _slice(size), None)
        for name, size, square in zip(names, sizes, squares, strict=True)
    ]
    if medians is not None:
        leaves = [
            leaf._replace(ratio=leaf.norm / medians[leaf.name])
            if leaf.name in medians
            else leaf
            for leaf in leaves
        ]
    order = [x.norm if x.ratio is None else x.ratio for x in leaves]
    order = np.nan_to_num(np.array(order), nan=np.inf, posinf=np.inf)
    return [leaves[i] for i in largest(order, len(leaves))]


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


def medians_of(history: History, names: list[str]) -> dict[str, float]:
    """Return the median norm of each leaf in a history.

    Raises:
      ValueError: The history has no norms of these leaves.
    """
    arrays = read(history)
    medians = {}
    # The norms of the whole gradient come first: those of rules may be of updates.
    for field in ("leaf_norm", "norm"):
        for transform, parts in parts_in(arrays, field).items():
            for name in set(parts) & set(names) - medians.keys():
                norms = arrays[f"{transform}/{field}/{name}"]
                positive = norms[np.isfinite(norms) & (norms > 0)]
                if positive.size:
                    medians[name] = float(np.median(positive))
    if not medians:
        raise ValueError(
            f"`history` has no norms of the leaves of `params`, such as {names[0]!r}."
            ' Record them: optclip.skip(tx, record="leaves"), or'
            ' clip_by_global_norm(..., record="leaves").'
        )
    return medians
