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

    Leaves with NaN or inf are first, leaves that the history lacks last.
    """
    norms = np.array([size.norm for size in sizes])
    with np.errstate(over="ignore", invalid="ignore"):
        relative = norms / (np.max(norms, where=np.isfinite(norms), initial=0) or 1)
        fractions = relative**2 / (np.sum(relative**2) or 1)
    leaves = [
        Leaf(name, size.norm, float(fraction), _slice(size), None)
        for name, size, fraction in zip(names, sizes, fractions, strict=True)
    ]
    order = norms
    if medians is not None:
        ratios = [
            norm / medians.get(n, np.inf) for n, norm in zip(names, norms, strict=True)
        ]
        leaves = [
            leaf._replace(ratio=float(ratio)) if leaf.name in medians else leaf
            for leaf, ratio in zip(leaves, ratios, strict=True)
        ]
        order = np.array(ratios)
    order = np.nan_to_num(order, nan=np.inf, posinf=np.inf)
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
