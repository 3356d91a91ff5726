"""Replacements for Adam that keep separate moments to clip by."""

from __future__ import annotations

from typing import Unpack

import optax

from .. import _responses as responses
from .. import _thresholds as thresholds
from .._arrays import _leaves, _validate
from .._arrays._numerics import promotable
from .._transforms import clip_by
from .._typing import ClipOptions, MomentClipOptions, Number
from .._wrappers import clip_after, transformation, with_periodic_reset
from ._recipe_options import (
    build,
    for_record,
    masked,
    reject_zero_after_moments,
)


def spam(
    inner: optax.GradientTransformation | None = None,
    *,
    theta: Number = 5000.0,
    b2: Number = 0.999,
    every: int = 500,
    warmup: int = 150,
    grace: int = 20,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip spikes of single elements, then apply Adam with periodic resets (SPAM).

    With `v` the running mean square of an element, a gradient with `g**2 > theta * v`
    becomes `sign(g) * sqrt(theta * v)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.recipes.spam(grace=1), optax.scale(-1e-3))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1e6):
      ...     updates, state = tx.update(jnp.array([size]), state)
      >>> print(f"{optclip.metrics(state)['clip/threshold']:.2f}")
      2.24

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam(b2=b2)`.
      theta: Maximum square of an element, as a multiple of `v`.
      b2: Decay of `v` and of Adam's second moment, from 0 to 1.
      every: Number of steps between resets of the moments and of `v`.
      warmup: Number of steps after a reset with scaled updates; see
        `optclip.with_periodic_reset`.
      grace: Number of unclipped steps at the start and after each reset.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation that replaces Adam; add a learning rate after it. Elements
      without earlier gradients are not clipped; the authors' code clips them to zero
      until the next reset.

    See Also:
      `thresholds.second_moment`, the rule.

    References:
      Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
      Training*, 2025, arXiv:2501.06842, algorithm 1.
    """
    _validate.fraction("b2", b2)
    grace = _validate.length("grace", grace, least=0)
    first = optax.scale_by_adam(b2=b2) if inner is None else inner
    rule = thresholds.second_moment(theta, b2, grace)
    clip = build(clip_by, options, rule, over="element")
    chain = optax.chain(clip, transformation("inner", first))
    return with_periodic_reset(chain, every, warmup=warmup)


def stable_spam(
    inner: optax.GradientTransformation | None = None,
    *,
    decay: Number = 0.999,
    b1: Number = 0.7,
    b2: Number = 0.9,
    every: int = 1000,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip elements, normalize leaves to a steady norm, then apply Adam (Stable-SPAM).

    With debiased running averages of each leaf's largest element (`peak`), norm
    (`mean`) and squared norm (`square`)::

        g = g / max(|g|) * peak if |g| > peak
        g = g / norm * mean / (sqrt(square) + eps)

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_spam()
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size, 1.0]), state)
      >>> print(f"{optclip.metrics(state)['max/threshold']:.0f}")
      501

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam()`.
      decay: Decay of the largest element's average.
      b1: Decay of the norm's average.
      b2: Decay of the squared norm's average.
      every: Number of steps between resets of `inner`; thresholds are not reset.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation that replaces Adam; add a learning rate after it. Its records are
      named `max` (elements) and `norm` (leaves); with `name="x"`, `x_max` and `x_norm`.

      A reset does not affect the averages. The authors' code restarts their step
      counter, so that thresholds are hundreds of times too large after a reset, and
      resets one step later.

    See Also:
      `thresholds.ema_of_max` and `thresholds.mean_over_rms`: the rules.

    References:
      Huang et al., *Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam*,
      2025, arXiv:2502.17055v2.
    """
    first = optax.scale_by_adam() if inner is None else inner
    elements = build(
        clip_by, for_record("max", options), thresholds.ema_of_max(decay),
        over="element", response="proportional",
    )  # fmt: skip
    leaves = build(
        clip_by, for_record("norm", options), thresholds.mean_over_rms(b1, b2),
        over="leaf", response="normalize",
    )  # fmt: skip
    reset = with_periodic_reset(first, every, warmup=0, keep=None)
    return optax.chain(elements, leaves, reset)


def acclip(
    b1: Number = 0.9,
    b2: Number = 0.99,
    alpha: Number = 1.0,
    eps: Number = 1e-5,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip the momentum's elements to the gradient's running mean modulus (ACClip).

    In each step::

        m = b1 * m + (1 - b1) * g
        tau**alpha = b2 * tau**alpha + (1 - b2) * |g|**alpha
        update = min(1, tau / (|m| + eps)) * m

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.acclip()
      >>> updates, _ = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)))
      >>> print(f"{updates[0]:.4f}")
      0.0100

    Args:
      b1: Decay of the momentum.
      b2: Decay of the threshold.
      alpha: Power of the mean, from 1 to 2 in the paper.
      eps: Number added to the modulus of the momentum.
      options: Options of `clip_by`, listed in `typing.MomentClipOptions`.

    Returns:
      A transformation that replaces Adam; add a learning rate after it.

    Raises:
      ValueError: `nonfinite="zero"` is passed, which would hide NaN moments.

    See Also:
      `thresholds.moment`, the rule.

    References:
      Zhang et al., *Why are Adaptive Methods Good for Attention Models?*, 2020,
      arXiv:1912.03194.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("alpha", alpha, above=True)
    reject_zero_after_moments("acclip", options)
    # As a function the response scales. Moved to its bound, an infinite moment would
    # stay hidden.
    clip = build(
        clip_by, options, thresholds.of_gradients(thresholds.moment(alpha, b2)),
        over="element", response=responses.Hard().coefficient, eps=eps,
    )  # fmt: skip
    momentum = masked(optax.ema(promotable(b1), debias=False), _leaves.are_floating)
    return clip_after(momentum, clip)
