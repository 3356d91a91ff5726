"""Gradients of a loss, clipped example by example, and their sum."""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from optclip._arrays import _leaves, _validate
from optclip._arrays._types import Nonfinite, Number, PyTree
from optclip.per_example import _clip_then_sum, _method
from optclip.per_example._clip_then_sum import Reduce
from optclip.per_example._example_clip import Relation, bound_of, check_floats
from optclip.per_example._example_gradients import Source, check_placed
from optclip.per_example._info import ExampleInfo
from optclip.per_example._loss import Loss, apart, check_positional
from optclip.per_example._method import METHODS, Method, Plan
from optclip.per_example._microbatches import batch_size
from optclip.per_example._responses import ExampleResponse
from optclip.scopes._interface import ScopeLike

# Modules of Flax NNX with Dropout contain PRNG keys and counters. Without copy=True
# Flax rejects the update of a counter inside the gradient's trace.
_TO_SPLIT = (
    "Pass it to the loss as another argument. Split a Flax NNX module by graphdef,"
    " params, rest = nnx.split(model, nnx.Param, ...), pass params, and call"
    " nnx.merge(graphdef, params, rest, copy=True) in the loss."
)


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """What `clipped_grad` returns: a function, and how much one example may change it.

    Args:
      loss: the loss of one example, checked.
      bound: how each gradient is clipped, and so how much it adds at most.
      microbatch_size: how many examples are derived at a time, None for all.
      reduce: whether gradients are added up, `"sum"` or `"none"`.
      method: how gradients are made, `"vmap"`, `"ghost"` or `"auto"`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, normalize_by=4)
      >>> print(f.sensitivity(), f.sensitivity("replace_one"))
      0.25 0.5
    """

    loss: Any
    bound: Any
    microbatch_size: int | None
    reduce: Reduce
    method: Method

    def __call__(
        self, *args: Any, padding: jax.Array | None = None, **keywords: Any
    ) -> tuple[PyTree, ExampleInfo]:
        """The clipped gradients and what each example had.

        Args:
          *args: those of the loss, `batch_argnums` with a batch axis in front.
          padding: which places of the batch are padding, `(batch,)` of bools; they add
            nothing, whatever is there. None is no padding.
          **keywords: none: the arguments of the loss are positional.

        Returns:
          The sum, like the parameters, in float32 or wider; and an `ExampleInfo`.

        Raises:
          TypeError: an argument of the loss is passed by keyword, or a parameter is not
            a dense array of floats, such as a PRNG key of a Flax NNX module.
        """
        check_positional(keywords)
        size = self.microbatch_size
        source = source_of(self.loss, args, size, self.method)
        is_ghost = _method.is_ghost(source, self.bound, size, self.method)
        return _clip_then_sum.clipped(
            source, self.bound, padding, size, self.reduce, is_ghost=is_ghost
        )

    def plan(self, *args: Any) -> Plan:
        """Which method is used for these arguments, and from what that was estimated.

        Args:
          *args: those of the loss, `batch_argnums` with a batch axis in front.

        Returns:
          A `Plan`: the method, what `"ghost"` does about each leaf, and the bytes that
          the gradients and the parts of a microbatch take.
        """
        size = self.microbatch_size
        source = source_of(self.loss, args, size, self.method)
        return _method.planned(source, self.bound, size, self.method)

    def sensitivity(
        self, relation: Relation = "add_or_remove", params: PyTree = None
    ) -> float:
        r"""How much the sum changes at most, in the L2 norm, by one example.

        Args:
          relation: what neighbouring batches are: `"add_or_remove"` one example,
            `"zero_out"` one, or `"replace_one"` by another, which is twice as much. The
            enum of `dp_accounting` is taken too.
          params: the parameters, whose leaves or groups are counted where one threshold
            stands for several; else None.

        Returns:
          :math:`\sqrt{\sum_k C_k^2}` over the thresholds, or the root of their number
          for `response="unit"`, divided by `normalize_by`. A float, or an array if a
          threshold is traced.
        """
        return self.bound.sensitivity(relation, params)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("init", "update"):
            raise AttributeError(
                "A transformation of optax must change gradients, got a ClippedGrad,"
                " which makes them. Call it in place of jax.grad(loss) and give the sum"
                " to the optimizer; for gradients of examples that are there already"
                " use optclip.per_example.aggregate(...)."
            )
        raise AttributeError(f"'ClippedGrad' object has no attribute {name!r}")


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
) -> ClippedGrad:
    r"""A function that clips the gradient of each example, then adds them up.

    .. math:: \frac{1}{N} \sum_i g_i \min(1, C / \|g_i\|)

    Args:
      loss: the loss of one example, `loss(params, example)` without a batch axis; it
        returns a number, or `(number, aux)` with `has_aux`.
      threshold: C, the most that the gradient of one example may have as its norm: a
        number, traced or not; a dict by label for groups; a prefix tree for leaves.
      argnums: by which argument of the loss it is derived, or by which several.
      has_aux: whether the loss returns `(value, aux)`, of which aux is kept by example.
      batch_argnums: which argument has the batch axis in front, or which several.
      microbatch_size: how many examples are derived at a time, which bounds the memory;
        it need not divide the batch. None is all at once.
      method: `"vmap"` computes the gradient of each example. `"ghost"` computes their
        norms from the inputs of each layer and the cotangents of its outputs, then the
        sum from these cotangents times the coefficients. `"auto"` takes the method with
        the smaller estimate of memory.
      reduce: `"sum"` adds the gradients up; `"none"` returns each of them, with the
        batch axis in front.
      normalize_by: N, a number that the sum is divided by: the *expected* size of a
        batch, never the actual one, which is private too.
      over: what shares a norm and has a threshold of its own: `"tree"`, `"leaf"` or
        `optclip.groups(...)`, which must label every leaf.
      response: what happens to a gradient: `"hard"`; `"auto_s"` scales by
        C / (norm + 0.01); `"normalize"`; `"drop"`; `"smooth"`; `"unit"` clips and
        divides by C; or a response of your own, such as
        `lambda norm, c: c / (norm + 0.1)`, which is cut at C / norm.
      nonfinite: what an example with NaN or inf in its gradient adds: `"zero"` nothing;
        `"propagate"` NaN; `"raise"` an error under `checkify`. NaN from a response of
        your own makes the sum NaN under each.
      strict: whether no example ever adds more than C, whatever is rounded; its norm is
        clipped inside a band of 1.3e-4 below C. `"ghost"` rounds the products of the
        sum after the norm is measured: see Guarantees.

    Returns:
      A function of the arguments of the loss, and `padding=None`. It returns the sum,
      like the parameters in float32 or wider, and an `ExampleInfo`. Its method
      `sensitivity(relation)` is the bound that noise is made for.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Guarantees:
      With `strict=True` and `method="vmap"`, of B examples, m at a time on n devices,
      the sum changes by one example by at most the sensitivity times 1 + K 2**-23 with
      K = B (max(m, 8) + n + 2), and by at most the sensitivity up to K = 500. That is
      the rounding of the sum in float32: m - 1 additions in a microbatch; at most
      max(8 / m, 1) of microbatches, whose sum is then added without a loss; n - 1
      across devices; three at the end. Without microbatches m is B. Padding changes no
      bit. The band covers the rounding of norms, except on a mesh of CPUs: XLA may add
      a small leaf of several axes in one chain there, and the worst norm found is 4e-4
      off.

      With `method="ghost"` a microbatch is summed over examples and positions after the
      norms are measured. In float32 an example of T positions exceeds C by about
      k (T + 1) 2**-24 beyond the band, where k is the sum of the norms of its positions
      over the norm of its gradient: cotangents that cancel to 1e-7 of their size gave
      22 %. Set `jax.default_matmul_precision("highest")` on accelerators, which else
      multiply float32 as TF32 or bfloat16. In fewer than 32 bits the sum over the
      microbatch is rounded, 3.4 times the sensitivity for 2,048 examples in bfloat16:
      that raises with `strict=True`, and so does a custom derivative between a
      parameter and its first use with data. After that any derivative rule, such as
      `clip_cotangent`, is exact.

    ======================== =======================================================
    edge                     what an example adds
    ======================== =======================================================
    a norm of 0              zeros
    a threshold of 0         zeros; `strict` takes one below 2**-36 for 0
    a threshold of inf       its gradient; the sensitivity is inf
    a norm above 3.4e38      what `nonfinite` says
    fp16, bf16 parameters    its gradient, clipped and added in float32
    a batch of padding       zeros; so is the sum of no example
    BatchNorm, MoE capacity  examples see each other, which no clip here can undo
    ======================== =======================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, strict=False)
      >>> batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> grads, info = f(jnp.zeros(2), batch)
      >>> print(grads, info.norms, f.sensitivity())
      [0.90000004 1.2       ] [5.  0.5] 1.0

    Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, *Deep Learning with
    Differential Privacy*, 2016, arXiv:1607.00133; AUTO-S: Bu, Wang, Zha, Karypis,
    *Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger*,
    2022, arXiv:2206.07136.
    """
    _clip_then_sum.check_size(microbatch_size)
    _validate.choice("reduce", reduce, ("sum", "none"))
    _validate.choice("method", method, METHODS)
    if reduce == "none" and method != "vmap":
        wanted = "'vmap' for reduce='none'"
        advice = "The gradients of single examples are made there alone."
        raise ValueError(_validate.must_be("method", wanted, method, advice))
    bound = bound_of(threshold, over, response, nonfinite, strict, normalize_by)
    checked = Loss(loss, argnums, batch_argnums, has_aux)
    return ClippedGrad(checked, bound, microbatch_size, reduce, method)


def source_of(
    loss: Loss, args: tuple[Any, ...], size: int | None, method: Method
) -> Source:
    """The gradients of the examples in the arguments of a loss."""
    params, examples = loss.params(args), loss.examples(args)
    check_floats(_leaves.flatten(params), _TO_SPLIT)
    number = batch_size(examples)
    if not isinstance(number, int) and (size is not None or method != "vmap"):
        raise ValueError(
            "A batch must have a static size for microbatches and for any method but"
            f" 'vmap', got the symbolic size {number}, microbatch_size={size} and"
            f" method={method!r}. Export it with a static batch dimension, or with"
            " microbatch_size=None and method='vmap'."
        )
    check_placed(params, examples, number if size is None else size)
    of_one = loss.of_one(args)
    params, split, axes = apart(of_one, params, examples)

    def gradient(example: PyTree) -> tuple[Any, Any, PyTree]:
        value_and_grads = jax.value_and_grad(of_one, has_aux=True)(params, example)
        (value, aux), grads = value_and_grads
        return value, aux, grads

    return Source(gradient, examples, split, axes, of_one, params)
