"""Clip each element to bounds, as an optax transformation."""

from __future__ import annotations

import optax

from .._arrays import _validate
from .._thresholds import Named, bounds
from .._typing import (
    Mask,
    Nonfinite,
    Record,
    ResponseLike,
    ThresholdTree,
)
from ._clip_by_transform import clip_by
from ._positions import checks_positions


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
    """Clip each element to `[-limit, limit]`, or to `[lower, upper]`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_value(1.0)
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  1. ]

    Args:
      limit: Symmetric bound: a number, array that broadcasts to each leaf, optax
        schedule, `optclip.thresholds` rule, or prefix tree of these. Complex elements
        are clipped by their modulus. Pass either `limit` or `lower` and `upper`.
      lower: Lower bound of any sign, in the same forms. Default: None, unbounded.
      upper: Upper bound of any sign, in the same forms. Default: None, unbounded.
      response: What happens outside the bounds. `"hard"` (default) moves elements to
        the bound, `"drop"` sets them to 0; `"normalize"` moves all elements. Other
        responses need a symmetric `limit`.
      strict: Whether bounds are rounded toward zero in the dtype of each leaf.
      nonfinite: `"propagate"` keeps NaN; inf moves to its bound if `response` is
        `"hard"`, `"normalize"` or `"proportional"`, to 0 if it is `"drop"`, and
        otherwise becomes NaN. `"zero"` zeros both, `"raise"` raises under
        `jax.experimental.checkify`.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      record: Whether to record each step; `"leaves"` records every metric per leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation. Elements within the bounds are bit-identical.

    Raises:
      TypeError: Both forms are passed, or neither.
      ValueError: A bound is NaN, `limit` is negative, or `lower > upper`.

    References:
      `tf.clip_by_value`; `clipvalue` of Keras; `optax.clip`.
    """
    two = _validate.is_two_sided(limit, lower, upper)
    return clip_by(
        bounds(lower, upper) if two else Named("limit", limit, "clip_by_value"),
        over="element", response=response, strict=strict, nonfinite=nonfinite,
        mask=mask, record=record, name=name,
    )  # fmt: skip
