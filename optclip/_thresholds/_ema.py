"""A multiple of the running average norm as the threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    _batching,
    _collectives,
    _maxima,
    _numerics,
    _validate,
    _xla,
)
from .._arrays._numerics import as_like, select
from .._arrays._packed_state import PerNorm
from .._arrays._types import Number, NumberOrSchedule, PyTree
from . import _running
from ._rule import Seen

_STARTS = ("first", "debiased", "zero")


class Average(NamedTuple):
    """The running norm, inf before the first, and the number of norms in it."""

    norm: PyTree
    step: PyTree


@dataclasses.dataclass(frozen=True)
class Ema:
    """See `ema`."""

    takes_vector: ClassVar[bool] = True
    learns_from_zeros: ClassVar[bool] = False

    ratio: NumberOrSchedule
    decay: Number
    warmup: int
    max_norm: Number
    start: str

    def init(self, norm: PyTree) -> Average:
        def unknown(x: jax.Array) -> jax.Array:
            return jnp.full_like(x, jnp.inf)

        return Average(jax.tree.map(unknown, norm), _running.counts(norm))

    def update(self, seen: Seen, memory: Average) -> tuple[PyTree, Average]:
        memory = memory._replace(step=_running.as_counts(memory.step))
        ratio: Number = self.ratio(seen.step) if callable(self.ratio) else self.ratio
        early = self._common_limit(seen.norm) if self.warmup > 0 else None

        def limit(norm: jax.Array, average: jax.Array, step: jax.Array) -> jax.Array:
            is_known = average < jnp.inf
            late = select(is_known, as_like(ratio, average) * average, average)
            warm = step >= self.warmup
            return select(warm, late, early(norm)) if early else late

        thresholds = _batching.each(limit, seen.norm, *memory)

        def learn(old: jax.Array, step: jax.Array, clipped: jax.Array) -> jax.Array:
            # A norm clipped to 0 is excluded: the average would decay to 0.
            return select(clipped > 0, self._averaged(old, clipped, step), old)

        norms = _batching.each(learn, *memory, seen.keep(thresholds))
        steps = _batching.each(_numerics.counted, memory.step)
        return thresholds, Average(norms, steps)

    def _common_limit(self, norms: PyTree) -> Callable[[jax.Array], jax.Array]:
        """Build the function that limits norms to a total L2 norm of `max_norm`."""
        leaves = jax.tree.leaves(norms)
        if isinstance(norms, PerNorm):
            batched = _batching.Batched.of_vector(*leaves)
        else:
            batched = _batching.Batched(leaves)
        peak, total = _peak_and_total(batched)

        def bound(norm: jax.Array) -> jax.Array:
            limit = as_like(self.max_norm, norm)
            is_over = (_numerics.fraction_of_peak(limit, peak) < total) & (norm > 0)
            # The norm is divided first: limit / (peak * total) alone may underflow.
            common_limit = limit * (_numerics.fraction_of_peak(norm, peak) / total)
            return select(is_over, common_limit, jnp.full_like(norm, jnp.inf))

        return bound

    def _averaged(self, old: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        """Return the average, updated by one norm."""
        is_first = old == jnp.inf
        if self.start == "debiased":
            weights = _running.debiased_weights(self.decay, step, new)
        else:
            weights = _running.weights(self.decay, new)
        none = jnp.zeros_like(old)
        mixed = _running.mean(*weights, select(is_first, none, old), new)
        if self.start == "zero":
            return mixed
        if self.start == "first":
            mixed = select(step < self.warmup, jnp.minimum(old, new), mixed)
        return select(is_first, new, mixed)


def _peak_and_total(batched: _batching.Batched) -> tuple[jax.Array, jax.Array]:
    """Return the largest norm, and the L2 norm of all over the largest, at least 1."""
    if not batched.values:
        return jnp.ones(()), jnp.ones(())
    peaks = batched.map(lambda x: _collectives.largest(x) if x.ndim else x)
    # Both results are materialized: otherwise XLA on CPU recomputes all norms for
    # each threshold.
    peak = _xla.materialized(_maxima.largest(_joined(peaks), None, 0.0))

    def square(x: jax.Array) -> jax.Array:
        squares = jnp.square(_numerics.fraction_of_peak(x, peak))
        if not x.ndim:
            return squares
        return _collectives.reduced_over(lax.psum, jnp.sum(squares))

    total = _numerics.root(jnp.sum(_joined(batched.map(square))))
    return peak, _xla.materialized(jnp.maximum(total, 1.0))


def _joined(batched: _batching.Batched) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in batched.values])


def ema(
    ratio: NumberOrSchedule = 1.05,
    decay: Number = 0.98,
    warmup: int = 100,
    max_norm: Number = 1.0,
    start: str = "first",
) -> Ema:
    """Clip to a multiple of the running average norm.

    The threshold is `ratio * mean`; then `mean = decay * mean + (1 - decay) * norm`
    with the clipped norm. During the warm-up a common factor clips all norms to a total
    L2 norm of `max_norm`: by default 1, in units of the norm, from which the average
    then grows by at most `(ratio - 1) * (1 - decay)` per step. Pass
    `max_norm=float("inf")` if usual norms exceed 1.

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

    Args:
      ratio: Threshold as a multiple of the average: a number or an optax schedule.
      decay: Decay of the average, from 0 to 1.
      warmup: Number of warm-up steps, counted per norm.
      max_norm: Maximum total norm during the warm-up; inf clips nothing.
      start: Start of the average: `"first"`, the smallest norm of the warm-up, or
        without one the first norm; `"zero"`; or `"debiased"`, zero with Adam's bias
        correction.

    Returns:
      A rule, intended for leaves, with a memory of one float and one count per norm.

    Edge cases:
      - First step of a norm without warm-up: the threshold is inf.
      - Zero, NaN or inf norm: does not enter its average, and does not count as a step
        of its warm-up.

    See Also:
      `recipes.adagc`, `recipes.olmo_ratio` and `recipes.aggc`.

    References:
      Wang, Li, et al., *AdaGC*, 2025, arXiv:2502.11034, algorithm 1.
    """
    if not callable(ratio):
        _validate.plain("ratio", ratio)
    _validate.fraction("decay", decay)
    if _validate.choice("start", start, _STARTS) == "zero":
        _validate.forgets("decay", decay)
    return Ema(
        ratio, decay, _validate.length("warmup", warmup, least=0),
        _validate.number("max_norm", max_norm), start,
    )  # fmt: skip
