"""The threshold that is a multiple of the running norm."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip import _arithmetic, _validate
from optclip.thresholds._rule import Seen, like


class Average(NamedTuple):
    """The running norm, inf before there is one, and the steps of warm-up taken."""

    norm: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Ema:
    """See `ema`."""

    ratio: Any
    decay: Any
    warmup: int
    max_norm: Any

    def __post_init__(self) -> None:
        _validate.plain("ratio", self.ratio)
        _validate.share("decay", self.decay)
        _validate.length("warmup", self.warmup, least=0)
        _validate.number("max_norm", self.max_norm)

    def init(self, norm: Any) -> Average:
        def unknown(x: jax.Array) -> jax.Array:
            return jnp.full_like(x, jnp.inf)

        return Average(jax.tree.map(unknown, norm), jnp.zeros((), jnp.int32))

    def update(self, seen: Seen, memory: Average) -> tuple[Any, Average]:
        warm = memory.step >= self.warmup
        peak, total = _all_norms(jax.tree.leaves(seen.norm))

        def bound(norm: jax.Array, average: jax.Array) -> jax.Array:
            limit = like(self.max_norm, norm)
            is_over = _arithmetic.share(limit, peak) < total
            # In this order: a factor for all could be too small a number.
            early = limit * (_arithmetic.share(norm, peak) / total)
            early = jnp.where(is_over, early, jnp.full_like(norm, jnp.inf))
            return jnp.where(warm, like(self.ratio, norm) * average, early)

        found = jax.tree.map(bound, seen.norm, memory.norm)

        def averaged(old: jax.Array, left: jax.Array) -> jax.Array:
            decay = like(self.decay, left)
            known = jnp.where(jnp.isinf(old), left, old)
            mixed = decay * known + (1 - decay) * left
            new = jnp.where(warm, mixed, jnp.minimum(old, left))
            new = jnp.where(jnp.isinf(old), left, new)
            # Where no gradient arrives there is nothing to learn.
            return jnp.where(left > 0, new, old)

        norms = jax.tree.map(averaged, memory.norm, seen.keep(found))
        return found, Average(norms, jnp.minimum(memory.step + 1, self.warmup))


def _all_norms(norms: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The largest norm, and the L2 norm of all of them over that, at least 1."""
    if not norms:
        return jnp.ones(()), jnp.ones(())
    peak = jnp.max(jnp.stack([jnp.max(x, initial=0.0) for x in norms]))
    squares = [jnp.sum(jnp.square(_arithmetic.share(x, peak))) for x in norms]
    total = _arithmetic.root(jnp.sum(jnp.stack(squares)))
    return peak, jnp.maximum(total, 1.0)


def ema(
    ratio: Any = 1.05,
    decay: Any = 0.98,
    warmup: int = 100,
    max_norm: Any = 1.0,
) -> Ema:
    r"""A multiple of the running average of the norms that were left.

    .. math:: c_t = ratio \cdot \gamma_{t-1}, \qquad
        \gamma_t = decay \cdot \gamma_{t-1} + (1 - decay) \cdot \|\text{clipped } u_t\|

    For the first `warmup` steps all norms of the scope are clipped together, by one
    factor, to `max_norm` of their L2 norm, and :math:`\gamma` is the smallest left.

    Args:
      ratio: a finite scalar of at least 0, traced or not.
      decay: a scalar from 0 to 1, traced or not.
      warmup: a number of steps, an int of at least 0.
      max_norm: a number of at least 0; inf clips nothing in the warm-up.

    Returns:
      A rule for any scope and norm, made for leaves; its memory is a float a norm.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first step         without warm-up: inf
    zero norm          as for any other; it does not enter the memory (a leaf that gets
                       no gradient for a while would be held to almost nothing)
    NaN or inf norm    as for any other; it never enters the memory
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.ema(1.5, decay=0.5, warmup=0)
      >>> tx = optclip.clip_by_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 2.0, 30.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [2.]
      [3.]
      [3.75]

    Source: Wang, Li, et al., *AdaGC: Improving Training Stability for Large Language
    Model Pretraining*, 2025, arXiv:2502.11034, algorithm 1.
    """
    return Ema(ratio, decay, warmup, max_norm)
