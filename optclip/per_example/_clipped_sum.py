"""Gradients that have a batch axis already: clipped one by one, and added."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optclip._arrays._types import Nonfinite, Number, PyTree
from optclip.per_example import _clip_then_sum
from optclip.per_example._example_clip import bound_of
from optclip.per_example._example_gradients import Source, check_whole
from optclip.per_example._info import ExampleInfo
from optclip.per_example._responses import ExampleResponse
from optclip.scopes._interface import ScopeLike


def clipped_sum(
    grads: PyTree,
    threshold: Number | PyTree,
    *,
    padding: jax.Array | None = None,
    normalize_by: Number = 1.0,
    over: ScopeLike = "tree",
    response: ExampleResponse = "hard",
    nonfinite: Nonfinite = "zero",
    strict: bool = True,
) -> tuple[PyTree, ExampleInfo]:
    r"""The sum of gradients of examples or workers, each clipped by its own norm.

    .. math:: \frac{1}{N} \sum_i g_i \min(1, C / \|g_i\|)

    Args:
      grads: a tree whose arrays have the examples, or workers, as their first axis.
      threshold: C, the most that one of them may have as its norm: a number, traced or
        not; a dict by label for groups; a prefix tree for leaves.
      padding: which places of the first axis are padding, an array of bools; None is
        none of them.
      normalize_by: N, a number above 0 that the sum is divided by.
      over: what shares a norm and has a threshold of its own: `"tree"`, `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: what happens to a gradient: `"hard"`, `"auto_s"`, `"normalize"`,
        `"drop"`, `"smooth"`, `"unit"`, or a response of your own.
      nonfinite: what a gradient with NaN or inf adds: `"zero"` nothing;
        `"propagate"` NaN; `"raise"` an error under `checkify`.
        NaN from a response of your own makes the sum NaN under each.
      strict: whether none ever adds more than C, whatever is rounded.

    Returns:
      A tree without the first axis, in float32 or wider, and an `ExampleInfo` whose
      values are None.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Example:
      Centered clipping of three workers, of which one sends nonsense:

      >>> import jax.numpy as jnp, optclip
      >>> center, workers = jnp.array([1.0]), jnp.array([[1.1], [0.8], [1e9]])
      >>> moved, _ = optclip.per_example.clipped_sum(
      ...     workers - center, 0.5, normalize_by=3, strict=False
      ... )
      >>> print(center + moved)
      [1.1333333]

    Source: centered clipping: Karimireddy, He, Jaggi, *Learning from History for
    Byzantine Robust Optimization*, 2021, arXiv:2012.10333.
    """
    bound = bound_of(threshold, over, response, nonfinite, strict, normalize_by)
    check_whole(grads)
    source = Source(lambda own: (None, None, own), grads)
    return _clip_then_sum.clipped(source, bound, padding, None)


def aggregate(
    threshold: Number | PyTree,
    *,
    normalize_by: Number,
    over: ScopeLike = "tree",
    response: ExampleResponse = "hard",
    nonfinite: Nonfinite = "zero",
    strict: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""An aggregator of optax: gradients with a batch axis in, one update out.

    .. math:: \frac{1}{N} \sum_i g_i \min(1, C / \|g_i\|)

    For `optax.experimental.aggregating.process`, or first in a chain.

    Args:
      threshold: C, the most that the gradient of one example may have as its norm: a
        number, a dict by label for groups, or a prefix tree for leaves.
      normalize_by: N, a number that the sum is divided by: the expected size of a
        batch.
      over: what shares a norm and has a threshold of its own: `"tree"`, `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: what happens to a gradient: `"hard"`, `"auto_s"`, `"normalize"`,
        `"drop"`, `"smooth"`, `"unit"`, or a response of your own.
      nonfinite: what a gradient with NaN or inf adds: `"zero"` nothing;
        `"propagate"` NaN; `"raise"` an error under `checkify`.
        NaN from a response of your own makes the sum NaN under each.
      strict: whether none ever adds more than C, whatever is rounded.

    Returns:
      A transformation whose `update` takes gradients with an axis of examples in front
      and, as an extra argument, `padding`; its state is empty.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> clip = optclip.per_example.aggregate(1.0, normalize_by=2, strict=False)
      >>> tx = optax.chain(clip, optax.sgd(1.0))
      >>> params = jnp.zeros(2)
      >>> grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> print(tx.update(grads, tx.init(params), params)[0])
      [-0.45000002 -0.6       ]
    """
    bound_of(threshold, over, response, nonfinite, strict, normalize_by)

    def init(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        padding: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del extra
        summed, _ = clipped_sum(
            updates, threshold, padding=padding, normalize_by=normalize_by,
            over=over, response=response, nonfinite=nonfinite, strict=strict,
        )  # fmt: skip
        _check_shapes(summed, params)
        return summed, state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_shapes(summed: PyTree, params: PyTree) -> None:
    """Raise if what was added up were not gradients with an axis of examples."""
    shapes, wanted = (
        [jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (summed, params)
    )
    if params is not None and shapes != wanted:
        raise ValueError(
            "The updates must have an axis of examples before those of the parameters,"
            f" got sums of the shapes {shapes} for parameters of {wanted}. Give"
            " gradients of examples, as jax.vmap(jax.grad(loss), (None, 0)) makes."
        )
