"""The pure clip of elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optclip import norms, responses, scopes
from optclip._arrays import _prefix, _validate
from optclip._clip._elements import ElementClip, Limits
from optclip.typing import Mask, Nonfinite, Number, PyTree


def clip_by_value(
    tree: PyTree,
    lower: Number | PyTree,
    upper: Number | PyTree,
    *,
    nonfinite: Nonfinite = "propagate",
    strict: bool = False,
    clip_mask: Mask | None = None,
) -> PyTree:
    r"""Clip each element to bounds, :math:`\max(\min(x, upper), lower)`.

    Args:
      tree: any pytree of arrays. Complex elements are clipped by their modulus.
      lower: a number, an array that broadcasts to each leaf without growing it, or a
        prefix tree of these. None, here or in the tree, for no bound.
      upper: likewise.
      nonfinite: see `optclip.functional`; `zero` and `drop` both put zero for NaN and
        inf.
      strict: round bounds that the dtype does not have towards zero.
      clip_mask: see `optclip.functional`.

    Returns:
      A tree like `tree`. Elements inside the bounds are kept to the bit.

    Raises:
      TypeError: a bound is not a number or an array of numbers.
      ValueError: a bound is NaN or does not broadcast; or both are concrete numbers
        and `lower > upper`. (Where an array `lower > upper`, the result is `lower`.)

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_value
      >>> print(clip_by_value(jnp.array([-5.0, 2.0, 3.0]), -4.4, 2.5))
      [-4.4  2.   2.5]

    Source: `tf.clip_by_value`; Mikolov, "Statistical Language Models Based on Neural
    Networks", PhD thesis, Brno University of Technology, 2012.
    """
    clip = ElementClip(
        scopes.ELEMENT, norms.L2, responses.Hard(),
        strict=strict, nonfinite=nonfinite, clip_mask=clip_mask,
    )  # fmt: skip
    for name, bound in (("lower", lower), ("upper", upper)):
        for value in jax.tree.leaves(bound):
            _validate.number(name, value, negative=True)
    _validate.ordered(lower, upper)
    layout = clip.layout(tree)
    index = layout.tree(list(range(len(layout.blocks))))
    low = _prefix.fill("lower", lower, index, none=-jnp.inf)
    high = _prefix.fill("upper", upper, index)
    pairs = zip(layout.entries(low), layout.entries(high), strict=True)
    return clip.apply(layout, [], [Limits(a, b) for a, b in pairs])[0]
