"""Methods in place of Adam, which keep moments of their own to clip by."""

from __future__ import annotations

from typing import Any, Unpack

import optax

from optclip import responses, thresholds
from optclip._arrays import _leaves, _validate
from optclip.recipes._recipe_options import build, refuse_behind_moments, unwrapped
from optclip.transforms._interface import clip_by
from optclip.typing import ClipOptions, MomentClipOptions, Number
from optclip.wrappers import clip_after, with_periodic_reset
from optclip.wrappers._interface import transformation


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
    r"""SPAM: Adam that clips spikes of single elements and resets its moments.

    .. math:: g_i \leftarrow \mathrm{sign}(g_i)\sqrt{\theta v_i} \quad
        \text{if } g_i^2 > \theta v_i

    Args:
      inner: what the clipped gradients go to; None is `optax.scale_by_adam(b2=b2)`.
      theta: :math:`\theta`, how many times v the square of an element may be.
      b2: the decay of v, and of Adam's second moment.
      every: the number of steps from one reset of moments and v to the next.
      warmup: the number of steps after a reset in which the updates grow back to their
        size; see `optclip.with_periodic_reset`.
      grace: the number of steps at the start, and after a reset, in which nothing is
        clipped.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation in place of Adam: a learning rate follows. Unlike in the authors'
      code an element that had no gradient yet is not clipped to zero for ever.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.recipes.spam(grace=1), optax.scale(-1e-3))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1e6):
      ...     updates, state = tx.update(jnp.array([size]), state)
      >>> print(f"{optclip.metrics(state)['clip/threshold']:.2f}")
      2.24

    The rule alone, with what it does at the edges: `thresholds.second_moment`.

    Source: Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
    Training*, 2025, arXiv:2501.06842, algorithm 1.
    """
    _validate.fraction("b2", b2)
    _validate.length("grace", grace, least=0)
    adam = optax.scale_by_adam(b2=b2) if inner is None else inner
    rule = thresholds.second_moment(theta, b2, grace)
    clip = build(clip_by, options, rule, over="element")
    chain = optax.chain(clip, transformation("inner", adam))
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
    r"""Stable-SPAM: elements by the running maximum, leaves to a steady norm, Adam.

    .. math:: g_i \leftarrow \frac{g_i}{\max|g|}\hat m \text{ if } |g_i| > \hat m,
        \qquad g \leftarrow \frac{g}{\|g\|}\frac{\hat\mu}{\sqrt{\hat\nu} + \epsilon}

    Args:
      inner: what the gradients then go to; None is `optax.scale_by_adam()`.
      decay: the decay of :math:`\hat m`, the running maximum of each leaf.
      b1: the decay of :math:`\hat\mu`, the running norm of each leaf.
      b2: the decay of :math:`\hat\nu`, the running square of that norm.
      every: the number of steps from one reset of Adam to the next; the thresholds are
        not reset.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation in place of Adam: a learning rate follows. The authors' code has
      one counter for all averages and sets it to 1 at a reset, so that its thresholds
      are then hundreds of times too large; and the step of a reset still uses the old
      moments. Neither is so here.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_spam()
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size, 1.0]), state)
      >>> print(f"{optclip.metrics(state)['max/threshold']:.0f}")
      501

    The rules alone, with what they do at the edges: `thresholds.ema_of_max`,
    `thresholds.mean_over_rms`.

    Source: Huang et al., *Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit
    Adam*, 2025, arXiv:2502.17055.
    """
    adam = optax.scale_by_adam() if inner is None else inner
    of_elements: dict[str, Any] = {"name": "max"} | unwrapped(options)
    of_leaves: dict[str, Any] = {"name": "norm"} | unwrapped(options)
    elements = build(
        clip_by, of_elements, thresholds.ema_of_max(decay), over="element",
        response="proportional",
    )  # fmt: skip
    leaves = build(
        clip_by, of_leaves, thresholds.mean_over_rms(b1, b2), over="leaf",
        response="normalize",
    )  # fmt: skip
    reset = with_periodic_reset(adam, every, warmup=0, keep=None)
    return optax.with_extra_args_support(optax.chain(elements, leaves, reset))


def acclip(
    b1: Number = 0.9,
    b2: Number = 0.99,
    alpha: Number = 1.0,
    eps: Number = 1e-5,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""ACClip: a momentum, each element clipped by the running mean of its gradient's.

    .. math:: m = \beta_1 m + (1 - \beta_1) g, \qquad
        \tau^\alpha = \beta_2\tau^\alpha + (1 - \beta_2)|g|^\alpha, \qquad
        u = \min\left(1, \frac{\tau}{|m| + \epsilon}\right) m

    Args:
      b1: :math:`\beta_1`, the decay of the momentum.
      b2: :math:`\beta_2`, the decay of the threshold.
      alpha: :math:`\alpha`, the power of which the mean is taken, from 1 to 2 in the
        paper.
      eps: :math:`\epsilon`, added to the modulus of the momentum.
      options: further arguments of `clip_by`: those of `typing.MomentClipOptions`.

    Returns:
      A transformation in place of Adam: a learning rate follows.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.acclip()
      >>> updates, _ = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)))
      >>> print(f"{updates[0]:.4f}")
      0.0100

    The rule alone, with what it does at the edges: `thresholds.moment`.

    Source: Zhang et al., *Why are Adaptive Methods Good for Attention Models?*, 2020,
    arXiv:1912.03194.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("alpha", alpha, above=True)
    refuse_behind_moments("acclip", options)
    clip = build(
        clip_by, options, thresholds.of_gradients(thresholds.moment(alpha, b2)),
        over="element", response=responses.detached("hard"), eps=eps,
    )  # fmt: skip
    return clip_after(
        optax.masked(optax.ema(b1, debias=False), _leaves.are_floating), clip
    )
