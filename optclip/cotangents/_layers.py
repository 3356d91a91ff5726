"""A layer whose outputs have clipped cotangents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

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
      **options: the further arguments of `clip_cotangent` but `probe`.

    Returns:
      A function with the arguments and the results of `block`.
    """
    wanted = "a function, or a layer that can be called"
    _validate.kind("block", block, Callable, wanted)

    @functools.wraps(block, updated=())
    def clipped(*args: Any, **kwargs: Any) -> PyTree:
        return clip_cotangent(block(*args, **kwargs), max_norm, **options)

    return clipped
