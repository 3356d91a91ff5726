"""Rules for skipping steps, as in large training codebases."""

from __future__ import annotations

import math
from typing import Unpack

import optax

from .. import _thresholds as thresholds
from .._arrays import _validate
from .._typing import Number, SkipOptions, ThresholdTree
from .._wrappers import skip
from ._recipe_options import adam_if_none, build, unwrapped


def olmo_skip(
    inner: optax.GradientTransformation | None = None,
    sigma: Number = 6.0,
    window: int = 128,
    *,
    use_loss: bool = True,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose norm or loss exceeds its mean plus 6 deviations (OLMo).

    A step is skipped if its norm is above `mean + sigma * std` of the last `window`
    norms, or its loss above the same limit for losses.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.recipes.olmo_skip(optax.sgd(1.0), window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for loss in (3.0, 3.1, 2.9, 9.0):
      ...     updates, state = tx.update(jnp.ones(1), state, value=loss)
      ...     print(updates)
      [-1.]
      [-1.]
      [-1.]
      [0.]

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam()`.
      sigma: Number of standard deviations.
      window: Number of past norms and losses. The first half skips nothing.
      use_loss: Whether to check the loss; `update` then requires `value` or `loss`.
      options: Options of `optclip.skip`.

    Returns:
      A transformation; wrap the whole optimizer, with its clipping and learning rate.

      NaN and inf never enter the window; in OLMo, one NaN skips `window` steps. Skipped
      finite steps do enter it, so a huge spike can hide later ones for `window` steps.
      To exclude them, pass `learn_skipped=False, max_consecutive=50`.

    See Also:
      `thresholds.mean_plus_std`, the rule.

    References:
      OLMo-core (allenai/OLMo-core), `SkipStepOptimizer`. The rules of MaxText and
      Levanter have the same defaults.
    """
    _validate.plain("sigma", sigma)
    _validate.flag("use_loss", use_loss)
    window = _validate.length("window", window)
    rule = thresholds.mean_plus_std(
        sigma, window, warmup=max(2, window // 2) - 1, ddof=1
    )
    defaults = {"learn_skipped": True, "max_consecutive": math.inf}
    return build(
        olmo_skip, skip, defaults | unwrapped(options), adam_if_none(inner),
        max_norm=rule, max_loss=rule if use_loss else None,
    )  # fmt: skip


def axlearn_skip(
    inner: optax.GradientTransformation | None = None,
    ratio: Number = 20.0,
    decay: Number = 0.99,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose norm exceeds 20 times its running average (AXLearn).

    A step is skipped if `norm > ratio * mean`, where `mean` is the debiased running
    average of the norms of accepted steps.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.recipes.axlearn_skip(optax.sgd(1.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 21.0, 19.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      ...     print(updates)
      [-1.]
      [0.]
      [-19.]

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam()`.
      ratio: Maximum norm as a multiple of the average. AXLearn's smallest is 20.
      decay: Decay of the running average, from 0 to 1.
      options: Options of `optclip.skip`.

    Returns:
      A transformation; wrap the whole optimizer, with its clipping and learning rate.
      It never skips the first step. AXLearn's average starts at 1, so it skips every
      step if all norms exceed 20. Both skip every step after a lasting rise above the
      ratio.

    See Also:
      `thresholds.ema`, the rule.

    References:
      AXLearn (apple/axlearn), `skip_and_clip_by_global_norm` with
      `drop_norm_by_grad_norm_ema`.
    """
    rule = thresholds.ema(ratio, decay, warmup=0, start="debiased")
    chosen = {"learn_skipped": False} | unwrapped(options)
    return build(axlearn_skip, skip, chosen, adam_if_none(inner), max_norm=rule)


def megatron_skip(
    inner: optax.GradientTransformation | None = None,
    max_norm: ThresholdTree = math.inf,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose norm exceeds a fixed number or is not finite (Megatron-LM).

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.recipes.megatron_skip(optax.sgd(1.0), max_norm=10.0)
      >>> print(tx.update(jnp.array([11.0]), tx.init(jnp.zeros(1)))[0])
      [0.]

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam()`.
      max_norm: Maximum norm of an accepted step: a number or an optax schedule.
        Default: inf, which skips only non-finite steps.
      options: Options of `optclip.skip`.

    Returns:
      A transformation; wrap the whole optimizer, with its clipping and learning rate.

    References:
      Megatron-LM (NVIDIA/Megatron-LM), `grad_norm_skip_threshold`.
    """
    return build(megatron_skip, skip, options, adam_if_none(inner), max_norm=max_norm)
