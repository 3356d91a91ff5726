"""Clip and sum per-example gradients that are already computed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves, _placement
from .._arrays._types import Held, Nonfinite, Number, PyTree
from .._scopes import ScopeLike
from . import _clip_then_sum
from ._bound import ExampleResponse, bound_of, check_floats
from ._clip_then_sum import ExampleInfo
from ._example_gradients import Source, check_together, check_whole, with_weights


def clipped_sum(
    grads: PyTree,
    threshold: Number | PyTree,
    *,
    padding: jax.Array | None = None,
    weights: jax.Array | None = None,
    normalize_by: Number = 1.0,
    over: ScopeLike = "tree",
    response: ExampleResponse = "hard",
    nonfinite: Nonfinite = "zero",
    strict: bool = True,
) -> tuple[PyTree, ExampleInfo]:
    """Clip the gradients of examples or workers separately, and sum them.

    The sum is `sum(g * min(1, C / norm(g)) for g in grads) / normalize_by`, with the
    threshold C. One gradient changes it by at most `C / normalize_by`, times the
    largest magnitude of `weights`.

    Example:
      Centered clipping of three workers, one of which sends an outlier:

      >>> import jax.numpy as jnp, optclip
      >>> center, workers = jnp.array([1.0]), jnp.array([[1.1], [0.8], [1e9]])
      >>> moved, _ = optclip.per_example.clipped_sum(
      ...     workers - center, 0.5, normalize_by=3, strict=False
      ... )
      >>> print(center + moved)
      [1.1333333]

    Args:
      grads: Pytree of arrays with examples or workers along the first axis.
      threshold: Maximum norm C of each gradient: a number, a dict by label for groups,
        or a prefix tree for leaves.
      padding: Bools along the first axis that mark padding. Default: None.
      weights: Finite numbers along the first axis that multiply the clipped gradients.
        A gradient of weight 0 adds nothing even if it is NaN. Default: None, 1.
      normalize_by: Divisor of the sum, above 0. Default: 1.
      over: Leaves that share a norm and a threshold: `"tree"` (default), `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: What happens above the threshold, as in `clipped_grad`.
      nonfinite: `"zero"` (default), `"propagate"` or `"raise"` for NaN and inf.
      strict: Whether no gradient adds more than C after rounding. Default: True.

    Returns:
      The sum, in float32 or wider, and an `ExampleInfo` whose `values` is None.

    Raises:
      TypeError: A leaf is not a dense array of floats. Optax adds up integers, which
        no threshold bounds.
      ValueError: The first axes of `grads` differ, or are split over mapped axes.

    See Also:
      `clipped_grad` also computes the gradients; `aggregate` works in `optax.chain`.

    References:
      Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
      Optimization", 2021, arXiv:2012.10333 (centered clipping).
    """
    bound = bound_of(threshold, over, response, nonfinite, strict, normalize_by)
    check_floats(_leaves.flatten(grads))
    check_whole(grads)
    check_together(grads)
    source = Source(lambda grad: (None, None, grad), _placement.on_device(grads))
    summed, info = _clip_then_sum.clipped(
        with_weights(source, weights), bound, padding, None
    )
    return _placement.back(summed, grads), info


def aggregate(
    threshold: Number | PyTree,
    *,
    normalize_by: Number,
    over: ScopeLike = "tree",
    response: ExampleResponse = "hard",
    nonfinite: Nonfinite = "zero",
    strict: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Build an optax aggregator that clips per-example gradients and sums them.

    `update` returns `sum(g * min(1, C / norm(g)) for g in updates) / normalize_by`,
    with the threshold C. Place it first in `optax.chain`, or pass it to
    `optax.experimental.aggregating.process`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> clip = optclip.per_example.aggregate(1.0, normalize_by=2, strict=False)
      >>> tx = optax.chain(clip, optax.sgd(1.0))
      >>> params = jnp.zeros(2)
      >>> grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> print(tx.update(grads, tx.init(params), params)[0])
      [-0.45000002 -0.6       ]

    Args:
      threshold: Maximum norm C of each gradient: a number, a dict by label for groups,
        or a prefix tree for leaves.
      normalize_by: Divisor of the sum: the expected batch size.
      over: Leaves that share a norm and a threshold: `"tree"` (default), `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: What happens above the threshold, as in `clipped_grad`.
      nonfinite: `"zero"` (default), `"propagate"` or `"raise"` for NaN and inf.
      strict: Whether no gradient adds more than C after rounding. Default: True.

    Returns:
      An optax transformation with an empty state. `update` takes gradients with a
      leading axis of examples and, optionally, `padding` and `weights`.

    Raises:
      TypeError: A leaf of the updates is not a dense array of floats.
      ValueError: The updates lack a leading axis of examples.

    See Also:
      `clipped_sum`, which also returns an `ExampleInfo`.
    """
    bound_of(threshold, over, response, nonfinite, strict, normalize_by)
    held = Held(functools.partial(
        clipped_sum, threshold=threshold, normalize_by=normalize_by,
        over=over, response=response, nonfinite=nonfinite, strict=strict,
    ))  # fmt: skip

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        padding: jax.Array | None = None,
        weights: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        summed, _ = held.value(updates, padding=padding, weights=weights)
        _check_shapes(summed, params)
        return summed, state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_shapes(summed: PyTree, params: PyTree) -> None:
    """Raise if the updates lacked a leading axis of examples."""
    shapes, wanted = (
        [jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (summed, params)
    )
    if params is not None and shapes != wanted:
        raise ValueError(
            "The updates must have a leading axis of examples, got sums of shapes"
            f" {shapes} for parameters of shapes {wanted}. Pass per-example gradients,"
            " such as from jax.vmap(jax.grad(loss), (None, 0)). optax.MultiSteps must"
            " not contain it: use optax.chain(aggregate, optax.MultiSteps(optimizer, k)"
            ".gradient_transformation())."
        )
