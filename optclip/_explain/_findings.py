"""Write a sentence for each entry that stands out."""

from __future__ import annotations

import numpy as np

from .._monitor import listed, stands_out
from ._attribution import Method
from ._explanation import Contribution, Leaf, Outlier, named, standing_out

# In healthy models one leaf, such as the embedding, often has over half.
_MOST_OF_A_LEAF, _MOST_TIMES_MEDIAN = 0.9, 10
# An example with a loss far above the others is named from this fraction on.
_SOME = 0.1
# Ratios within this factor of the largest rose together.
_TOGETHER = 3


def of_contributions(
    tables: tuple[list[Contribution], ...], method: Method
) -> list[str]:
    """Return the sentence of a single loss, example or position, in this order.

    One with over half comes before one whose loss is far above the others.
    """
    of = "the gradient" if method == "derivative" else "the squared norms of examples"
    found = [x for x in (standing_out(each, 0.5) for each in tables) if x]
    texts = [f"{entry.fraction:.1%} of {of} is {entry}." for entry in found]
    # The first positions of a text usually have larger losses.
    for entries in tables[:2]:
        losses = np.sort([entry.loss for entry in entries[1:]])
        first = standing_out(entries, _SOME)
        if first and stands_out(first.loss, losses, is_loss=True):
            texts.append(
                f"{first.fraction:.1%} of {of} is {first}, whose loss is"
                f" {first.loss:.3g}; the median of the others is"
                f" {np.median(losses):.3g}."
            )
    return texts[:1]


def of_leaves(leaves: list[Leaf]) -> list[str]:
    """Return the sentence of a slice or a leaf of the gradient."""
    if not leaves or not all(np.isfinite(leaf.norm) for leaf in leaves):
        return []
    largest = max(leaves, key=lambda leaf: leaf.fraction)
    part = largest.slice
    of = "of the squared norm of the gradient is"
    # Of two slices, one always has half.
    if part is not None and part.shape[part.axis] > 2:
        fraction = largest.fraction * part.fraction
        if fraction > max(0.5, 2 / part.shape[part.axis]):
            return [f"{fraction:.1%} {of} {part} of {named(largest.name)}."]
    if largest.fraction > _MOST_OF_A_LEAF and len(leaves) > 2:
        return [f"{largest.fraction:.1%} {of} {named(largest.name)}."]
    return []


def of_history(leaves: list[Leaf]) -> list[str]:
    """Return the sentence of a leaf that exceeds its own median."""
    ratios = [
        (leaf.ratio, leaf.name)
        for leaf in leaves
        if leaf.ratio is not None and np.isfinite(leaf.ratio)
    ]
    if not ratios or max(ratios)[0] <= _MOST_TIMES_MEDIAN:
        return []
    (ratio, name), *others = sorted(ratios, reverse=True)
    if others and others[0][0] * _TOGETHER > ratio:
        times = f"{min(ratios)[0]:.3g} times to {ratio:.3g} times"
        return [f"Leaves have {times} their median norms."]
    rest = f"; the others have at most {others[0][0]:.3g} times" if others else ""
    return [f"{named(name)} has {ratio:.3g} times its median norm{rest}."]


def of_outliers(outliers: list[Outlier]) -> list[str]:
    """Return the sentence of the largest outlier of the parameters."""
    return [
        f"Parameters: {outlier} has {outlier.ratio:.3g} times the median"
        f" {'root mean square of a matrix' if outlier.axis is None else 'norm'}."
        for outlier in outliers[:1]
    ]


def of_nonfinite(
    losses: list[tuple[int, ...]],
    examples: list[int],
    leaves: list[str],
    params: list[str],
    batch: int,
) -> list[str]:
    """Return the sentences of NaN and inf."""
    sentences = []
    if params:
        names = listed([named(name) for name in params])
        sentences.append(f"Parameters are not finite: {names}.")
    if len(losses) == 1:
        example, *position = losses[0]
        entry = Contribution(example, position[0] if position else None, 0.0, 0.0)
        sentences.append(f"The loss of {entry} is not finite.")
    elif losses:
        sentences.append(f"{len(losses)} losses are not finite.")
    elif leaves:
        sentences.append("All losses are finite, but the gradient is not.")
    if leaves:
        names = listed([named(name) for name in leaves])
        of = listed([f"example {i}" for i in examples])
        of = "each example" if len(examples) == batch > 1 else of
        by = f", by {of}" if of else ""
        sentences.append(f"NaN or inf in the gradient of {names}{by}.")
    return sentences
