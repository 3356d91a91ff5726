"""Wrap layers so that the cotangents of their outputs are clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax

from .._arrays import _validate
from .._arrays._held import Held
from .._typing import CotangentOptions, Number, PyTree
from ._clip_cotangent import clip_cotangent


def with_clipped_cotangent(
    block: Callable[..., Any],
    max_norm: Number | PyTree,
    **options: Unpack[CotangentOptions],
) -> Callable[..., Any]:
    """Wrap a layer so that the cotangents of all its outputs are clipped.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> def layer(w, x):
      ...     return {"h": w * x, "count": jnp.int32(x.size)}
      >>> def loss(w):
      ...     out = optclip.with_clipped_cotangent(layer, 1.0)(w, jnp.array([3.0, 4.0]))
      ...     return jnp.sum(out["h"] ** 2) / 2
      >>> print(jax.grad(loss)(1.0))
      5.0

    Args:
      block: Function, or callable layer of Flax, Equinox or Haiku. Wrap it where it is
        called, so that its parameters keep their place in the model.
      max_norm: Threshold, in the forms that `clip_cotangent` accepts.
      options: Other arguments of `clip_cotangent` except `probe`.

    Returns:
      A function with the arguments and results of `block`.
    """
    wanted = "a function or a callable layer"
    _validate.kind("block", block, Callable, wanted)
    _validate.options(options, CotangentOptions.__optional_keys__)
    # This raises errors that do not depend on the layer's output before the first call.
    plain: Any = {k: v for k, v in options.items() if k not in ("mask", "axis_name")}
    is_tree = not jax.tree_util.all_leaves([max_norm])
    clip_cotangent((), 1.0 if is_tree else max_norm, **plain)

    held = Held((max_norm, options))

    @functools.wraps(block, updated=())
    def clipped(*args: Any, **kwargs: Any) -> PyTree:
        max_norm, options = held.value
        return clip_cotangent(block(*args, **kwargs), max_norm, **options)

    return clipped
