"""A threshold that scales by the previous step's norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_like, ratio, select
from .._arrays._types import Number, PyTree
from ._rule import Seen


@dataclasses.dataclass(frozen=True)
class PreviousNorm:
    """See `previous_norm`."""

    takes_vector: ClassVar[bool] = True

    max_norm: Number

    def init(self, norm: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        def threshold(norm: jax.Array, previous: jax.Array) -> jax.Array:
            # In the first step, and after a zero gradient, the memory is 0. The current
            # norm then replaces it.
            before = select(previous > 0, previous, norm)
            limit = as_like(self.max_norm, norm)
            exceeds = before > limit
            safe = select(exceeds, before, jnp.ones_like(before))
            return select(exceeds, norm * ratio(limit, safe), norm)

        return _batching.each(threshold, seen.norm, memory), seen.norm


def previous_norm(max_norm: Number = 1.0) -> PreviousNorm:
    """Scale by the previous step's norm, as optimizers fused into the backward pass do.

    The update is `u * min(1, max_norm / previous)`, so the threshold is
    `norm * min(1, max_norm / previous)`. The first large norm after small ones is not
    clipped.

    An optimizer that updates each layer during the backward pass does not have the
    global norm yet. This rule shows the effect in an ordinary run. Inside such an
    optimizer, call
    `optclip.functional.clip_by_global_norm(gradient, max_norm, use_norm=previous)` per
    layer.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(optclip.thresholds.previous_norm(1.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (4.0, 2.0, 0.5, 8.0, 8.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [1.]
      [0.5]
      [0.25]
      [8.]
      [1.]

    Args:
      max_norm: Maximum norm of the updates while norms do not grow.

    Returns:
      A rule whose memory is the last finite norm. In the first step, and after a norm
      of 0, the threshold is `max_norm`.
    """
    return PreviousNorm(_validate.plain("max_norm", max_norm))
