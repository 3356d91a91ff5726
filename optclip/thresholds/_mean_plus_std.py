"""The threshold from mean and standard deviation of the last norms."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optclip._arrays import _numerics, _validate
from optclip._arrays._types import Number, PyTree
from optclip.thresholds import _window
from optclip.thresholds._rule import Seen, like
from optclip.thresholds._window import Window


@dataclasses.dataclass(frozen=True)
class MeanPlusStd:
    """See `mean_plus_std`."""

    takes_vector: ClassVar[bool] = True

    k: Number
    window: int
    warmup: int | None
    ddof: int

    def __post_init__(self) -> None:
        _validate.plain("k", self.k)
        _validate.length("window", self.window)
        if self.warmup is not None:
            _validate.length("warmup", self.warmup)
        _validate.length("ddof", self.ddof, least=0)
        if self._needed > self.window:
            wanted = (
                f"{self._needed} or more with warmup={self.warmup} and ddof={self.ddof}"
            )
            advice = (
                "With fewer norms nothing would ever be clipped. Give a longer window,"
                " or less of these."
            )
            raise ValueError(_validate.must_be("window", wanted, self.window, advice))

    @property
    def _needed(self) -> int:
        """The number of norms from which on there is a threshold."""
        needed = max(2, self.window // 2) if self.warmup is None else self.warmup
        return max(needed, self.ddof + 1)

    def init(self, norm: PyTree) -> Window:
        return _window.empty(norm, self.window)

    def update(self, seen: Seen, memory: Window) -> tuple[PyTree, Window]:
        def bound(ring: jax.Array) -> jax.Array:
            mean, deviation = _mean_and_deviation(ring, memory.num_known, self.ddof)
            # After equal norms the deviation is 0. The floor of 1e-6 of the mean keeps
            # rounding from clipping.
            threshold = mean + like(self.k, mean) * jnp.maximum(
                deviation, jnp.abs(mean) * 1e-6
            )
            return jnp.where(
                memory.num_known >= self._needed,
                threshold,
                jnp.full_like(threshold, jnp.inf),
            )

        return jax.tree.map(bound, memory.norms), _window.with_norms(
            memory, seen.norm, self.window
        )


def _mean_and_deviation(
    ring: jax.Array, count: jax.Array, ddof: int
) -> tuple[jax.Array, jax.Array]:
    is_filled = _window.is_known(ring, count)
    ring = jnp.where(is_filled, ring, jnp.zeros_like(ring))
    # The peak is a modulus, since `skip` has rules for a loss, which may be negative.
    peak = jnp.max(jnp.abs(ring), axis=-1)
    # Norms are divided by the largest, since squares above 1e19 would overflow.
    fractions = _numerics.fraction(ring, peak[..., None])
    number = jnp.maximum(count, 1).astype(ring.dtype)
    mean = jnp.sum(fractions, axis=-1) / number
    offsets = jnp.where(is_filled, fractions - mean[..., None], jnp.zeros_like(ring))
    freedom = jnp.maximum(count - ddof, 1).astype(ring.dtype)
    deviation = _numerics.root(jnp.sum(jnp.square(offsets), axis=-1) / freedom)
    return mean * peak, deviation * peak


def mean_plus_std(
    k: Number = 3.0, window: int = 128, warmup: int | None = None, ddof: int = 0
) -> MeanPlusStd:
    r"""The mean of the norms before this one plus k of their standard deviations.

    .. math:: c_t = \mathrm{mean} + k \cdot \mathrm{std}\quad
        \text{of } n_{t-window}, \ldots, n_{t-1}

    Args:
      k: a finite scalar of at least 0, traced or not.
      window: how many norms are kept, an int.
      warmup: with fewer norms than these nothing is clipped; None is half the window,
        at least 2.
      ddof: what is taken from their number in the variance, like NumPy's: 1 is what
        PyTorch does.

    Returns:
      A rule for any scope and norm. The norms are those before the clip, so that the
      threshold does not creep down.

    Raises:
      ValueError: `window` is shorter than `warmup` and `ddof` ask for.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    warm-up            inf: nothing is clipped
    equal norms        a millionth of k above them
    zero norm          counts as any other
    NaN or inf norm    as for any other; it never enters the memory
    first step         inf: nothing is clipped
    this step's norm   is not in the window; it enters it unclipped
    ================== ==============================================================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.mean_plus_std(2.0, window=4)
      >>> tx = optclip.clip_by_global_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (2.0, 4.0, 30.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [2.]
      [4.]
      [5.]

    Source: `clip_update_by_historical_norm` of Levanter (marin-community/levanter),
    whose smallest deviation is an absolute 1e-6.
    """
    return MeanPlusStd(k, window, warmup, ddof)
