"""The norm of the parameters at the first step as the threshold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_like, select
from .._arrays._types import Number, PyTree
from ._rule import Seen


class FirstNorm(NamedTuple):
    """Hold the norm of the parameters at the first step, or -1 before it.

    Its type differs from the memory of a rule of gradients, which has the same shape.
    """

    norm: PyTree


@dataclasses.dataclass(frozen=True)
class InitialNorm:
    """See `initial_norm`."""

    takes_vector: ClassVar[bool] = True

    ratio: Number

    def init(self, norm: PyTree) -> FirstNorm:
        return FirstNorm(jax.tree.map(lambda x: jnp.full_like(x, -1.0), norm))

    def update(self, seen: Seen, memory: FirstNorm) -> tuple[PyTree, FirstNorm]:
        _validate.params_given(seen.params, "thresholds.initial_norm")
        measured = seen.measure(seen.params)
        initial = _batching.each(
            lambda old, norm: select(old < 0, norm, old), memory.norm, measured
        )

        def threshold(norm: jax.Array) -> jax.Array:
            limit = as_like(self.ratio, norm) * norm
            return select(norm > 0, limit, jnp.full_like(norm, jnp.inf))

        return _batching.each(threshold, initial), FirstNorm(initial)


def initial_norm(ratio: Number = 1.0) -> InitialNorm:
    """Clip to the parameters' norm at the first step, over the same scope.

    In `optclip.constrain` with `response="normalize"`, each parameter keeps this norm,
    as in the Hyperball optimizer. `relative_to_params(1.0)` reads the last step's norm
    instead, and drifts by its rounding errors.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> keep_norm = optclip.clip_by(
      ...     optclip.thresholds.initial_norm(),
      ...     over="leaf", response="normalize", name="weights",
      ... )
      >>> tx = optclip.constrain(optax.sgd(1.0), keep_norm)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([-3.0, 4.0]), tx.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      [5. 0.]

    Args:
      ratio: Threshold as a multiple of the first norm.

    Returns:
      A rule whose memory is the first finite norm; `update` requires `params`. Where it
      is 0, as of a bias or of LoRA's second factor, the threshold is inf.

    See Also:
      `constrain`, `thresholds.relative_to_params`.

    References:
      Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them 2.1:
      Hyperball Optimization*, 2025.
    """
    return InitialNorm(_validate.plain("ratio", ratio))
