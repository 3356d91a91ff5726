"""A layer whose outputs have clipped cotangents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax

from optclip._arrays import _validate
from optclip.cotangents._clip_cotangent import clip_cotangent
from optclip.typing import CotangentOptions, Number, PyTree


def with_clipped_cotangent(
    block: Callable[..., Any],
    max_norm: Number | PyTree,
    **options: Unpack[CotangentOptions],
) -> Callable[..., Any]:
    """A function like `block`, with `clip_cotangent` on all that it returns.

    Args:
      block: a function, or a layer that can be called, of Flax, Equinox or Haiku. Wrap
        it where it is called, so that its parameters stay where the model has them.
      max_norm: where to clip, as `clip_cotangent` takes it.
      options: the further arguments of `clip_cotangent`, all but `probe`.

    Returns:
      A function with the arguments and the results of `block`.

    Raises:
      TypeError: `block` cannot be called, or an option is none of `clip_cotangent`.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> def layer(w, x):
      ...     return {"h": w * x, "count": jnp.int32(x.size)}
      >>> def loss(w):
      ...     out = optclip.with_clipped_cotangent(layer, 1.0)(w, jnp.array([3.0, 4.0]))
      ...     return jnp.sum(out["h"] ** 2) / 2
      >>> print(jax.grad(loss)(1.0))
      5.0
    """
    wanted = "a function, or a layer that can be called"
    _validate.kind("block", block, Callable, wanted)
    _validate.options(options, CotangentOptions.__optional_keys__)
    # Errors that do not depend on the layer's output are raised here, before the first
    # call.
    plain: Any = {k: v for k, v in options.items() if k not in ("mask", "axis_name")}
    is_tree = not jax.tree_util.all_leaves([max_norm])
    clip_cotangent((), 1.0 if is_tree else max_norm, **plain)

    @functools.wraps(block, updated=())
    def clipped(*args: Any, **kwargs: Any) -> PyTree:
        return clip_cotangent(block(*args, **kwargs), max_norm, **options)

    return clipped
