"""The threshold that clips by the norm of the step before."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optclip._arrays import _batching, _validate
from optclip._arrays._numerics import ratio, select
from optclip._arrays._types import Number, PyTree
from optclip.thresholds._rule import Seen, like


@dataclasses.dataclass(frozen=True)
class PreviousNorm:
    """See `previous_norm`."""

    takes_vector: ClassVar[bool] = True

    max_norm: Number

    def __post_init__(self) -> None:
        _validate.plain("max_norm", self.max_norm)

    def init(self, norm: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        def threshold(norm: jax.Array, previous: jax.Array) -> jax.Array:
            # Nothing is known in the first step, nor of what had no gradient.
            before = select(previous > 0, previous, norm)
            limit = like(self.max_norm, norm)
            exceeds = before > limit
            safe = select(exceeds, before, jnp.ones_like(before))
            return select(exceeds, norm * ratio(limit, safe), norm)

        return _batching.each(threshold, seen.norm, memory), seen.norm


def previous_norm(max_norm: Number = 1.0) -> PreviousNorm:
    r"""Clip by the norm of the step before, as what runs inside the backward pass must.

    .. math:: u \leftarrow u \min(1, max\_norm / n_{t-1}), \qquad
        c_t = n_t \min(1, max\_norm / n_{t-1})

    An optimizer that updates each layer as soon as its gradient is there has no global
    norm yet. It can scale by the last one, and this rule is that clip where all
    gradients are there, to see what it costs in a run. Inside such an optimizer call
    `optclip.functional.clip_by_global_norm(gradient, max_norm, use_norm=previous)` for
    each layer.

    Args:
      max_norm: a finite scalar of at least 0, traced or not: what the norm of the
        updates is at most if it does not grow from one step to the next.

    Returns:
      A rule for any scope and norm; its memory is the last norm. It is approximate: the
      step in which a norm first grows is not clipped.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first step         `max_norm`
    last norm 0        `max_norm`
    NaN or inf norm    by the norm before it, which stays in the memory
    zero norm          0: there is nothing to clip
    ================== ==============================================================

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
    """
    return PreviousNorm(max_norm)
