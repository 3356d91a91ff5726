"""Convert functions of a user that close over traced values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr


def converted(
    function: Callable[..., Any], *examples: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Turn the arrays that a function closes over into additional arguments.

    `jax.closure_convert` leaves integers, bools and keys in the closure. The rule of a
    custom derivative runs after its function, when such tracers are no longer valid.

    Args:
      function: A pure function of pytrees of arrays.
      examples: Its arguments, for their structures, shapes and dtypes.

    Returns:
      A function of the same arguments followed by the arrays; and the arrays.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    consts, number = list(traced.consts), len(examples)

    def evaluated(*args: Any) -> Any:
        leaves = jax.tree.leaves(args[:number])
        results = eval_jaxpr(traced.jaxpr, args[number:], *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    if consts:
        # A jaxpr may hold its constants, and a tracer among them would outlive its
        # trace. Tracing again with arguments in their place removes them.
        again, more = converted(evaluated, *examples, *consts)
        return again, [*consts, *more]
    return evaluated, consts
