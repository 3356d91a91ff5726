"""Measure per-example gradient norms without clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._arrays import _validate
from .._arrays._types import PyTree
from .._scopes import ScopeLike
from . import _clip_then_sum, _method
from ._bound import bound_of
from ._clipped_grad import source_of
from ._loss import Loss
from ._method import METHODS, Method


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
    checked = Loss(loss, argnums, batch_argnums, has_aux)

    def measured(
        *args: Any, padding: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        source = source_of(checked, args, size, method)
        is_ghost = _method.is_ghost(source, bound, method)
        return _clip_then_sum.measured(source, bound, padding, size, is_ghost=is_ghost)

    return measured
