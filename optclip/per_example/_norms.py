"""The norms of the gradients of examples, which nothing is clipped by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from optclip._arrays import _validate
from optclip._arrays._types import PyTree
from optclip.per_example import _method, _sum
from optclip.per_example._bound import bound_of
from optclip.per_example._clipped_grad import source_of
from optclip.per_example._loss import Loss
from optclip.per_example._method import METHODS, Method
from optclip.scopes._scope import ScopeLike


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
      of such for groups or leaves; 0 for padding.

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
    _sum.check_size(microbatch_size)
    _validate.choice("method", method, METHODS)
    bound = bound_of(0.0, over, "hard", "zero", False, 1.0)
    checked = Loss(loss, argnums, batch_argnums, has_aux)

    def measured(
        *args: Any, padding: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        source = source_of(checked, args)
        is_ghost = _method.is_ghost(source, bound, microbatch_size, method)
        return _sum.measured(source, bound, padding, microbatch_size, is_ghost=is_ghost)

    return measured
