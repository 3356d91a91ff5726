"""Clip each element to bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .. import _responses as responses
from .._arrays import _validate
from .._arrays._batching import Batched
from .._clip import (
    MOVE,
    Clip,
    apply,
    decide,
    fixed,
    layout_of,
)
from .._norms import L2, Measured
from .._scopes import ELEMENT
from .._typing import Mask, Nonfinite, Number, PyTree
from ._clip_by import NEEDS_STATE, raise_if_exchanged

P = ParamSpec("P")
T = TypeVar("T")


def _checks_limit(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` reject `limit=` together with `upper`.

    By position, the same argument is the lower bound, as in `tf.clip_by_value`.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        limit, upper = kwargs.get("limit"), kwargs.get("upper")
        if limit is not None and upper is not None:
            _validate.is_two_sided(limit, kwargs.get("lower"), upper)
        return function(*args, **kwargs)

    return checked


@_checks_limit
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
    """Clip each element to `[-limit, limit]`, or to `[lower, upper]`.

    `clip_by_value(x, 1.0)` has symmetric bounds. `clip_by_value(x, -1.0, 2.0)` has a
    lower and an upper one, as in `tf.clip_by_value` and `jnp.clip`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_value
      >>> print(clip_by_value(jnp.array([-5.0, 2.0, 3.0]), -4.4, 2.5))
      [-4.4  2.   2.5]

    Args:
      tree: Pytree of arrays.
      limit: Symmetric bound, or the lower bound if passed by position with `upper`: a
        number, an array that broadcasts to each leaf, or a prefix tree of these with
        None for unbounded. Complex elements are clipped by their modulus.
      upper: Upper bound of any sign, in the same forms. Default: None, unbounded.
      lower: Lower bound of any sign, in the same forms. Default: None, unbounded.
      strict: Whether bounds are rounded toward zero in the dtype of each leaf.
      nonfinite: `"propagate"` moves inf to its bound and keeps NaN, `"zero"` zeros
        both, `"raise"` raises under `jax.experimental.checkify`.
      mask: Leaves to clip: a tree of bools or a function. Default: all.

    Returns:
      The clipped tree. Elements within the bounds are bit-identical. Where an array
      `lower` exceeds `upper`, the result is `lower`.

    Raises:
      TypeError: No bound is passed, `limit` is combined with `lower`, or `limit=` with
        `upper=`.
      ValueError: A bound is NaN or does not broadcast, `limit` is negative, or
        `lower > upper` where both are numbers.

    References:
      `tf.clip_by_value`; Mikolov, "Statistical Language Models Based on Neural
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
        bounds = {"lower": lower, "upper": upper}
        for name, bound in bounds.items():
            _check(name, bound, negative=True)
        _validate.ordered(lower, upper)
    else:
        bounds = {"limit": limit}
        _check("limit", limit)
    layout = layout_of(clip, tree)
    # Moving elements reads the shape and dtype of a norm only, so none is computed.
    leaves = [jnp.real(block.leaves[0].array) for block in layout.blocks]
    measured = Measured(Batched(leaves))
    return apply(decide(clip, layout, fixed(bounds), measured))[0]


def _check(name: str, bound: PyTree, *, negative: bool = False) -> None:
    for value in jax.tree.leaves(bound):
        _validate.number(name, value, negative=negative, rule_advice=NEEDS_STATE)
