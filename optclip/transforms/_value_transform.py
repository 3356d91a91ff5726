"""The clip of each element, one call of `clip_by`."""

from __future__ import annotations

import optax

from optclip._arrays import _validate
from optclip.thresholds import bounds
from optclip.thresholds._interface import Named
from optclip.transforms._clip_by_transform import clip_by
from optclip.transforms._positions import checks_positions
from optclip.typing import (
    Mask,
    Nonfinite,
    Record,
    ResponseLike,
    ThresholdTree,
)


@checks_positions(" For two bounds pass lower= and upper=.")
def clip_by_value(
    limit: ThresholdTree | None = None,
    *,
    lower: ThresholdTree | None = None,
    upper: ThresholdTree | None = None,
    response: ResponseLike = "hard",
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each element to :math:`[-limit, limit]`, or to :math:`[lower, upper]`.

    Args:
      limit: the largest modulus that is let through, the symmetric bound: a number, an
        array that broadcasts to each leaf, an optax schedule, a rule, or a prefix tree
        of these. 0 clips to zero. Complex elements are clipped by their modulus. Keras
        calls it `clipvalue`. Give this, or `lower` and `upper`.
      lower: the lower bound, of any sign, given in the same ways; None is no bound.
      upper: the upper bound, of any sign, given in the same ways; None is no bound.
      response: what happens to an element outside its bounds: `"hard"` moves it to the
        bound; `optclip.responses` has others for a symmetric `limit`.
      strict: whether a bound that the dtype of a leaf has no number for is rounded
        towards zero, not to nearest.
      nonfinite: what a NaN or an inf does: `"propagate"` moves inf to its bound and
        keeps NaN; `"zero"` makes the element zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation. Elements inside the bounds are kept to the bit.

    Raises:
      TypeError: both forms are given, or neither; a bound is not a number.
      ValueError: a concrete bound is NaN, `limit` is negative, or `lower > upper`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0)
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  1. ]

    Source: `tf.clip_by_value`; Keras' `clipvalue`; `optax.clip`.
    """
    two = _validate.is_two_sided(limit, lower, upper)
    return clip_by(
        bounds(lower, upper) if two else Named("limit", limit, "clip_by_value"),
        over="element", response=response, strict=strict, nonfinite=nonfinite,
        mask=mask, record=record, name=name,
    )  # fmt: skip
