"""What all pure clips do: measure, fit the threshold to the norms, apply."""

import jax

from optclip._arrays import _prefix, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree
from optclip._clip._clip import Clip


def run(
    clip: Clip,
    tree: PyTree,
    name: str,
    threshold: PyTree,
    known: Batched | None = None,
) -> tuple[PyTree, PyTree]:
    """The clipped tree and its norms, in the structure of the scope.

    `name` is the argument that the threshold is given as; `known` are norms that are
    not computed anew.
    """
    _validate.not_none(name, threshold)
    for value in jax.tree.leaves(threshold):
        _validate.number(name, value)
    layout = clip.layout(tree)
    measured = clip.measure(layout) if known is None else known
    found = layout.tree(measured.entries())
    spread = _prefix.fill(name, threshold, found)
    limits = clip.fit(name, layout.entries(spread), measured)
    clipped, _ = clip.apply(layout, measured, limits)
    return clipped, found
