"""Clip or measure the gradient of a loss per example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._arrays import _axis_names, _leaves, _placement, _validate
from .._arrays._call_errors import explains_call
from .._arrays._types import Nonfinite, Number, PyTree
from .._scopes import ScopeLike
from . import _clip_then_sum
from ._bound import Bound, ExampleResponse, Relation, bound_of, check_floats
from ._clip_then_sum import ExampleInfo, Reduce
from ._example_gradients import Source, check_placed, check_together, with_weights
from ._loss import Loss, apart, loss_of
from ._microbatches import batch_size

Method = Literal["vmap", "ghost"]
METHODS = ("vmap", "ghost")

# Flax NNX modules with Dropout contain PRNG keys and counters. Without copy=True, Flax
# rejects the update of a counter inside the gradient's trace.
_TO_SPLIT = (
    "Pass it to the loss as another argument. Split a Flax NNX module with graphdef,"
    " params, rest = nnx.split(model, nnx.Param, ...), pass params, and call"
    " nnx.merge(graphdef, params, rest, copy=True) in the loss."
)


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """Compute the sum of clipped per-example gradients, and its sensitivity.

    Returned by `clipped_grad`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, normalize_by=4)
      >>> print(f.sensitivity(), f.sensitivity("replace_one"))
      0.25 0.5

    Args:
      loss: Loss of one example.
      bound: Clipping of each gradient.
      microbatch_size: Number of examples differentiated at a time; None for all.
      reduce: `"sum"` or `"none"`.
      method: `"vmap"` or `"ghost"`.
    """

    loss: Any
    bound: Any
    microbatch_size: int | None
    reduce: Reduce
    method: Method

    def __call__(
        self,
        *args: Any,
        padding: jax.Array | None = None,
        weights: jax.Array | None = None,
    ) -> tuple[PyTree, ExampleInfo]:
        """Compute the clipped gradients, and information about each example.

        Args:
          *args: Arguments of the loss, with a leading batch axis at `batch_argnums`.
          padding: Bools `(batch,)` that mark padding, which adds nothing even if it is
            NaN. Default: None, no padding.
          weights: Finite numbers `(batch,)` of any sign that multiply the clipped
            gradients, limited to `max_weight` in magnitude. An example of weight 0 adds
            nothing even if it is NaN, except that `nonfinite="raise"` raises. Required
            with `max_weight`. Default: None, 1.

        Returns:
          The sum, a tree like the parameters in float32 or wider, and an `ExampleInfo`.

        Raises:
          TypeError: A parameter is not a dense array of floats, such as a PRNG key in a
            Flax NNX module.
          ValueError: `weights` is passed without `max_weight`, or missing with it.
        """
        self.bound.check_weights(weights)
        size = self.microbatch_size
        source = _source_of(self.loss, args, self.bound, size, self.method)
        grads, info = _clip_then_sum.clipped(
            with_weights(source, weights), self.bound, padding, size, self.reduce
        )
        return _placement.back(grads, self.loss.params(args)), info

    def sensitivity(
        self, relation: Relation = "add_or_remove", params: PyTree = None
    ) -> float:
        """Compute the largest L2 change of the sum when one example changes.

        It is `sqrt(sum(C**2)) / normalize_by` over all thresholds C, times `max_weight`
        if that is set. With `response="unit"` each C counts as 1, and `"replace_one"`
        doubles the result. The weight of an example must not depend on other examples.

        Args:
          relation: How neighboring batches differ in one example: `"add_or_remove"`
            (default), `"zero_out"` or `"replace_one"`, or the enum of `dp_accounting`.
          params: Parameters, required if one threshold applies to several leaves or
            groups.

        Returns:
          A float, inf where a float32 sum may overflow; an array if a threshold is
          traced.
        """
        return self.bound.sensitivity(relation, params)


@explains_call
def clipped_grad(
    loss: Callable[..., Any],
    threshold: Number | PyTree,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: int | None = None,
    method: Method = "vmap",
    reduce: Reduce = "sum",
    normalize_by: Number = 1.0,
    over: ScopeLike = "tree",
    response: ExampleResponse = "hard",
    nonfinite: Nonfinite = "zero",
    strict: bool = True,
    max_weight: Number | None = None,
) -> ClippedGrad:
    """Compute per-example gradients, clip each, and sum them over the batch.

    The sum is `sum(g * min(1, C / norm(g)) for g in gradients) / normalize_by`, with
    the threshold C. The call takes a weight per example, a factor of its summand.

    The loss must not combine examples, as BatchNorm and MoE capacity limits do:
    clipping does not bound their effect.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, strict=False)
      >>> batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> grads, info = f(jnp.zeros(2), batch)
      >>> print(grads, info.norms, f.sensitivity())
      [0.90000004 1.2       ] [5.  0.5] 1.0

    Args:
      loss: Loss of one example, `loss(params, example)`, without a batch axis.
      threshold: Maximum norm C of each gradient: a number, a dict by label for groups,
        or a prefix tree for leaves.
      argnums: Argument or arguments to differentiate with respect to. Default: 0.
      has_aux: Whether the loss returns `(value, aux)`. Default: False.
      batch_argnums: Argument or arguments with a leading batch axis. Default: 1.
      microbatch_size: Number of examples differentiated at a time, which bounds memory.
        Default: None, all.
      method: `"vmap"` (default) computes each gradient; `"ghost"` computes norms, then
        the sum from scaled cotangents.
      reduce: `"sum"` (default), or `"none"` for each clipped gradient.
      normalize_by: Divisor of the sum: the *expected* batch size, since the actual one
        is sensitive. Default: 1.
      over: Leaves that share a norm and a threshold: `"tree"` (default), `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: `"hard"` (default), `"smooth"`, `"normalize"` or `"drop"`; `"auto_s"`
        multiplies by `C / (norm + 0.01)`; `"unit"` clips and divides by C. Coefficients
        of custom responses are limited to `C / norm`.
      nonfinite: For an example with NaN or inf, `"zero"` (default) adds nothing,
        `"propagate"` adds NaN, and `"raise"` raises under `checkify`.
      strict: Whether no example adds more than C after rounding, which clips to
        `C * (1 - 1.3e-4)`. Default: True.
      max_weight: Largest magnitude of a weight, which multiplies the sensitivity: 0, a
        normal float32, or inf for any. Default: None, a function without weights.

    Returns:
      A `ClippedGrad`. Call it with the loss's arguments, and optionally `padding`
      and `weights`, for the sum in float32 or wider and an `ExampleInfo` of the
      unweighted gradients. Its method `sensitivity` bounds the effect of one
      example. Compile the call with `jax.jit`; otherwise microbatches and ghost norms
      compile in each call.

    Raises:
      ValueError: `reduce="none"` is combined with `method="ghost"`.

    Warns:
      UserWarning: An argument outside `batch_argnums` has the length of the batch.

    Guarantees:
      With `strict=True` and `method="vmap"`, one of B examples changes the sum by at
      most the sensitivity times `1 + K * 2**-23`, where `K = B * (max(m, 8) + n + 2)`
      for m examples at a time on n devices. Up to K = 500 the margin of `strict` covers
      this rounding. On a mesh of CPUs, norms can be off by 4e-4.

      `"ghost"` rounds the sum after measuring norms. In float32, an example with T
      positions can exceed C by a factor of about `1 + k * (T + 1) * 2**-24`, where k is
      the sum of its positions' norms divided by its norm. On accelerators set
      `jax.default_matmul_precision("highest")`. `"ghost"` rejects custom derivatives
      between a parameter and its first use with data and, with `strict=True`, sums in
      fewer than 32 bits.

      A threshold of 0 (with `strict`, below 2**-36) makes the sum zero; inf clips
      nothing and makes the sensitivity inf. A norm above 3.4e38 counts as non-finite.
      An empty or fully padded batch gives zeros. NaN from a custom response makes the
      sum NaN for every `nonfinite`.

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016, arXiv:1607.00133.
      Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier
      and Stronger", 2022, arXiv:2206.07136 (`"auto_s"`).
    """
    microbatch_size = _clip_then_sum.size_of(microbatch_size)
    _validate.choice("reduce", reduce, ("sum", "none"))
    _validate.choice("method", method, METHODS)
    _validate.require(
        "method",
        method,
        reduce != "none" or method == "vmap",
        "'vmap' for reduce='none'",
        "Other methods do not compute the gradient of each example.",
    )
    bound = bound_of(
        threshold, over, response, nonfinite, strict, normalize_by, max_weight
    )
    checked = loss_of(loss, argnums, batch_argnums, has_aux)
    return ClippedGrad(checked, bound, microbatch_size, reduce, method)


def _source_of(
    loss: Loss, args: tuple[Any, ...], bound: Bound, size: int | None, method: Method
) -> Source:
    """Return the per-example gradients of a loss at these arguments."""
    params, examples = _placement.on_device(loss.params(args)), loss.examples(args)
    check_floats(_leaves.flatten(params), _TO_SPLIT)
    check_together(params)
    number = batch_size(examples)
    if not isinstance(number, int) and (size is not None or method != "vmap"):
        raise ValueError(
            "Microbatches and method='ghost' require a static batch size, got the"
            f" symbolic size {number}, microbatch_size={size} and method={method!r}."
            " Export with a static batch dimension, or pass microbatch_size=None and"
            " method='vmap'."
        )
    check_placed(params, examples, number if size is None else size)
    of_one = loss.of_one(args)
    params, split, axes = apart(of_one, params, examples)

    def gradient(example: PyTree) -> tuple[Any, Any, PyTree]:
        (value, aux), grads = jax.value_and_grad(of_one, has_aux=True)(params, example)
        return value, aux, grads

    source = Source(gradient, examples, split, axes, of_one, params)
    if method == "vmap":
        return source
    _check_ghost(source, bound)
    # Without examples there is nothing to trace.
    return source._replace(is_ghost=number > 0)


def norms(
    loss: Callable[..., Any],
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: int | None = None,
    method: Method = "vmap",
    over: ScopeLike = "tree",
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Measure the gradient norm of each example, without clipping.

    Useful for the gradient noise scale, data pruning and thresholds. The norms are
    sensitive.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.norms(loss)
      >>> values, norms = f(jnp.ones(2), jnp.array([[3.0, 4.0], [0.3, 0.4]]))
      >>> print(norms)
      [5.  0.5]

    Args:
      loss: Loss of one example, `loss(params, example)`, without a batch axis.
      argnums: Argument or arguments to differentiate with respect to. Default: 0.
      has_aux: Whether the loss returns `(value, aux)`; aux is discarded. Default:
        False.
      batch_argnums: Argument or arguments with a leading batch axis. Default: 1.
      microbatch_size: Number of examples differentiated at a time. Default: None, all.
      method: `"vmap"` (default) computes each gradient, `"ghost"` only its norm.
      over: Leaves that share a norm: `"tree"` (default), `"leaf"` or
        `optclip.groups(...)`.

    Returns:
      A function of the loss's arguments, and optionally of `padding`, that returns the
      values `(batch,)` and the norms: `(batch,)`, or a dict or tree of these for groups
      or leaves.
    """
    size = _clip_then_sum.size_of(microbatch_size)
    _validate.choice("method", method, METHODS)
    bound = bound_of(0.0, over, "hard", "zero", False, 1.0)
    checked = loss_of(loss, argnums, batch_argnums, has_aux)

    def measured(
        *args: Any, padding: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        source = _source_of(checked, args, bound, size, method)
        return _clip_then_sum.measured(source, bound, padding, size)

    return measured


def _check_ghost(source: Source, bound: Bound) -> None:
    """Raise if norms cannot be computed without gradients."""
    if any(map(jnp.iscomplexobj, jax.tree.leaves(source.params))):
        raise ValueError(
            "method='ghost' does not support complex parameters. Use method='vmap', or"
            " pass real and imaginary parts as two leaves."
        )
    arrays = jax.tree.leaves((source.params, source.examples))
    kinds = [jax.typeof(jnp.asarray(x)) for x in arrays]
    if any(_axis_names.varying(kind) - {*source.axes} for kind in kinds):
        raise ValueError(
            "method='ghost' does not support parameters that are split inside"
            " shard_map. Use method='vmap', or jax.jit without shard_map."
        )
    # Only Explicit axes are part of an array's type.
    if any(any(kind.sharding.spec) for kind in kinds):
        raise ValueError(
            "method='ghost' does not support arrays that are split over Explicit mesh"
            " axes. Use method='vmap', or Auto axes."
        )
    _validate.require(
        "nonfinite",
        "raise",
        bound.nonfinite != "raise",
        "'zero' or 'propagate' for method='ghost'",
        "Pass method='vmap', which computes the gradient of each example.",
    )
