"""The norms of the gradients of examples, which nothing is clipped by."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from optclip._arrays import _validate
from optclip._arrays._types import PyTree
from optclip.per_example import _clip_then_sum, _method
from optclip.per_example._clipped_grad import source_of
from optclip.per_example._example_clip import bound_of
from optclip.per_example._loss import Loss, check_positional
from optclip.per_example._method import METHODS, Method, Plan
from optclip.scopes._interface import ScopeLike


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleNorms:
    """What `norms` returns: a function, and which method it takes.

    Args:
      loss: the loss of one example, checked.
      bound: what shares a norm; nothing is clipped.
      microbatch_size: how many examples are derived at a time, None for all.
      method: how norms are made, `"vmap"`, `"ghost"` or `"auto"`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(jnp.tanh(example @ w))
      >>> f = optclip.per_example.norms(loss, method="auto")
      >>> print(f.plan(jnp.ones((64, 64)), jnp.ones((8, 64))).method)
      ghost
    """

    loss: Any
    bound: Any
    microbatch_size: int | None
    method: Method

    def __call__(
        self, *args: Any, padding: jax.Array | None = None, **keywords: Any
    ) -> tuple[jax.Array, PyTree]:
        """The value of the loss and the norm of each example.

        Args:
          *args: those of the loss, `batch_argnums` with a batch axis in front.
          padding: which places of the batch are padding, `(batch,)` of bools; they have
            zeros, whatever is there. None is no padding.
          **keywords: none: the arguments of the loss are positional.

        Returns:
          The values, `(batch,)`; and the norms, `(batch,)` or a tree of such.

        Raises:
          TypeError: an argument of the loss is passed by keyword.
        """
        check_positional(keywords)
        size = self.microbatch_size
        source = source_of(self.loss, args, size, self.method)
        is_ghost = _method.is_ghost(source, self.bound, size, self.method)
        return _clip_then_sum.measured(
            source, self.bound, padding, size, is_ghost=is_ghost
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


def norms(
    loss: Callable[..., Any],
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: int | None = None,
    method: Method = "vmap",
    over: ScopeLike = "tree",
) -> ExampleNorms:
    r"""A function that measures the gradient of each example, :math:`\|g_i\|`.

    For the gradient noise scale, for data pruning, for the choice of a threshold. It is
    **not private**.

    Args:
      loss: the loss of one example, `loss(params, example)` without a batch axis; it
        returns a number, or `(number, aux)` with `has_aux`.
      argnums: by which argument of the loss it is derived, or by which several.
      has_aux: whether the loss returns `(value, aux)`, of which aux is left away.
      batch_argnums: which argument has the batch axis in front, or which several.
      microbatch_size: how many examples are derived at a time, which bounds the memory;
        it need not divide the batch. None is all at once.
      method: `"vmap"` makes the gradient of each example; `"ghost"` makes its norm from
        what goes into each layer and the cotangents of what comes out; `"auto"` takes
        what is estimated to need less memory.
      over: what shares a norm: `"tree"`, `"leaf"` or `optclip.groups(...)`.

    Returns:
      A function of the arguments of the loss, and `padding=None`. It returns the values
      of the loss, `(batch,)`, and the norms: `(batch,)` over the tree, a dict or tree
      of such for groups or leaves; 0 for padding. Its method `plan` says what
      `"auto"` takes.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.norms(loss)
      >>> values, norms = f(jnp.ones(2), jnp.array([[3.0, 4.0], [0.3, 0.4]]))
      >>> print(norms)
      [5.  0.5]
    """
    _clip_then_sum.check_size(microbatch_size)
    _validate.choice("method", method, METHODS)
    bound = bound_of(0.0, over, "hard", "zero", False, 1.0)
    checked = Loss(loss, argnums, batch_argnums, has_aux)
    return ExampleNorms(checked, bound, microbatch_size, method)
