"""The pure clip of elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optclip import responses
from optclip._arrays import _leaves, _prefix, _validate
from optclip._arrays._batching import Batched
from optclip._clip import (
    MOVE,
    Clip,
    Layout,
    Thresholds,
    apply,
    decided,
    fixed,
    layout_of,
)
from optclip.functional._clip_by import raise_if_exchanged
from optclip.norms._interface import L2, Measured
from optclip.scopes._interface import ELEMENT
from optclip.typing import Mask, Nonfinite, Number, PyTree


def clip_by_value(
    tree: PyTree,
    limit: Number | PyTree | None = None,
    upper: Number | PyTree | None = None,
    *,
    lower: Number | PyTree | None = None,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
) -> PyTree:
    r"""Clip each element to :math:`[-limit, limit]`, or to :math:`[lower, upper]`.

    `clip_by_value(x, 1.0)` has symmetric bounds. `clip_by_value(x, -1.0, 2.0)` has a
    lower and an upper one, as in `tf.clip_by_value` and `jnp.clip`.

    Args:
      tree: any pytree of arrays.
      limit: the largest modulus that is let through, the symmetric bound: a number, an
        array that broadcasts to each leaf without growing it, or a prefix tree of these
        with None for no bound. 0 clips to zero. Complex elements are clipped by their
        modulus. Keras calls it `clipvalue`. With `upper` it is the lower bound.
      upper: the upper bound, of any sign, passed in the same ways; None is no bound.
      lower: the lower bound, of any sign, passed in the same ways; None is no bound.
      strict: whether a bound that the dtype of a leaf has no number for is rounded
        towards zero, not to nearest.
      nonfinite: what a NaN or an inf does: `"propagate"` moves inf to its bound and
        keeps NaN; `"zero"` makes the element zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.

    Returns:
      A tree like `tree`. Elements inside the bounds are kept to the bit.

    Raises:
      TypeError: no bound is passed, or `limit` with `lower`; a bound is not a number
        or an array of numbers.
      ValueError: a bound is NaN or does not broadcast; `limit` is negative; or both
        bounds are concrete numbers and `lower > upper`. (Where an array
        `lower > upper`, the result is `lower`.)

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_value
      >>> print(clip_by_value(jnp.array([-5.0, 2.0, 3.0]), lower=-4.4, upper=2.5))
      [-4.4  2.   2.5]

    Source: `tf.clip_by_value`; Mikolov, "Statistical Language Models Based on Neural
    Networks", PhD thesis, Brno University of Technology, 2012.
    """
    raise_if_exchanged("limit", tree, limit)
    if upper is not None and lower is None:
        limit, lower = None, limit
    clip = Clip(
        ELEMENT, L2, responses.Hard(), MOVE,
        strict=strict, nonfinite=nonfinite, mask=mask,
    )  # fmt: skip
    if _validate.is_two_sided(limit, lower, upper):
        for name, bound in (("lower", lower), ("upper", upper)):
            _check(name, bound, negative=True)
        _validate.ordered(lower, upper)
    else:
        _check("limit", limit)
    layout = layout_of(clip, tree)
    # Moving elements reads the shape and dtype of a norm only, so none is computed.
    leaves = [jnp.real(_leaves.unwrap(block.leaves[0])) for block in layout.blocks]
    measured = Measured(Batched(leaves))
    if limit is None:
        thresholds = _two_sided(layout, lower, upper)
    else:
        thresholds = fixed("limit", limit)(layout, measured.norms)
    return apply(decided(clip, layout, measured, thresholds))[0]


def _two_sided(layout: Layout, lower: PyTree, upper: PyTree) -> Thresholds:
    blocks = layout.tree(list(range(len(layout.blocks))))
    bounds = {
        "lower": _prefix.fill("lower", lower, blocks, none=-jnp.inf),
        "upper": _prefix.fill("upper", upper, blocks),
    }
    return Thresholds({name: layout.entries(x) for name, x in bounds.items()})


def _check(name: str, bound: PyTree, *, negative: bool = False) -> None:
    for value in jax.tree.leaves(bound):
        _validate.number(name, value, negative=negative)
