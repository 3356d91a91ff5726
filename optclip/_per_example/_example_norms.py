"""Measure per-example gradient norms without clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._arrays import _validate
from .._arrays._types import PyTree
from .._scopes import ScopeLike
from . import _clip_then_sum, _method
from ._bound_argument import bound_of
from ._clipped_grad import has_loops, source_again, source_of
from ._eager import run_once_compiled
from ._loss import Loss, check_positional
from ._method import METHODS, Method, Plan


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleNorms:
    """Compute the loss and the gradient norm of each example.

    Returned by `norms`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(jnp.tanh(example @ w))
      >>> f = optclip.per_example.norms(loss, method="auto")
      >>> print(f.plan(jnp.ones((64, 64)), jnp.ones((8, 64))).method)
      ghost

    Args:
      loss: Loss of one example.
      bound: Leaves that share a norm.
      microbatch_size: Number of examples differentiated at a time; None for all.
      method: `"vmap"`, `"ghost"` or `"auto"`.
    """

    loss: Any
    bound: Any
    microbatch_size: int | None
    method: Method

    def __call__(
        self, *args: Any, padding: jax.Array | None = None, **keywords: Any
    ) -> tuple[jax.Array, PyTree]:
        """Compute the loss and the gradient norm of each example.

        Args:
          *args: Arguments of the loss, with a leading batch axis at `batch_argnums`.
          padding: Bools `(batch,)` that mark padding, whose results are 0. Default:
            None, no padding.
          **keywords: Rejected; pass the loss's arguments by position.

        Returns:
          The values, `(batch,)`, and the norms, `(batch,)` or a dict or tree of these.
        """
        check_positional(keywords)
        size = self.microbatch_size
        source = source_of(self.loss, args, size, self.method)
        is_ghost = _method.is_ghost(source, self.bound, size, self.method)
        if not has_loops(source, size, is_ghost=is_ghost):
            return _clip_then_sum.measured(
                source, self.bound, padding, size, is_ghost=is_ghost
            )
        options = self.loss.options, self.bound, size, is_ghost
        return run_once_compiled(
            _measured, self.loss.function, options, (args, padding)
        )

    def plan(self, *args: Any) -> Plan:
        """Report the method for these arguments, with the memory estimates.

        Args:
          *args: Arguments of the loss, with a leading batch axis at `batch_argnums`.

        Returns:
          A `Plan`.
        """
        size = self.microbatch_size
        source = source_of(self.loss, args, size, self.method)
        return _method.planned(source, self.bound, size, self.method)


def _measured(function: Callable[..., Any], options: Any, operands: Any) -> Any:
    """Return the losses and the norms, from the parts of a call."""
    (of_loss, bound, size, is_ghost), (args, padding) = options, operands
    source = source_again(Loss(function, *of_loss), args, size, is_ghost=is_ghost)
    return _clip_then_sum.measured(source, bound, padding, size, is_ghost=is_ghost)


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
      method: `"vmap"` (default) computes each gradient, `"ghost"` only its norm;
        `"auto"` chooses the smaller memory estimate.
      over: Leaves that share a norm: `"tree"` (default), `"leaf"` or
        `optclip.groups(...)`.

    Returns:
      An `ExampleNorms`. Call it with the loss's arguments, and optionally `padding`,
      for the values `(batch,)` and the norms: `(batch,)`, or a dict or tree of these
      for groups or leaves.
    """
    microbatch_size = _clip_then_sum.size_of(microbatch_size)
    _validate.choice("method", method, METHODS)
    bound = bound_of(0.0, over, "hard", "zero", False, 1.0)
    checked = Loss(loss, argnums, batch_argnums, has_aux)
    return ExampleNorms(checked, bound, microbatch_size, method)
