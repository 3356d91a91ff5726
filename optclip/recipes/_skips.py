"""Steps that are left out, as the large training codes do."""

from __future__ import annotations

import math
from typing import Any, Unpack

import optax

from optclip import thresholds
from optclip._arrays import _validate
from optclip.recipes._recipe_options import build, unwrapped
from optclip.typing import Number, SkipOptions, ThresholdTree
from optclip.wrappers import skip


def olmo_skip(
    inner: optax.GradientTransformation | None = None,
    sigma: Number = 6.0,
    window: int = 128,
    *,
    use_value: bool = True,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""OLMo's rule: skip if loss or norm is above its mean plus 6 deviations.

    .. math:: \text{skip if } n > \mathrm{mean} + \sigma\,\mathrm{std} \text{ of the
        last } n_{t-128}, \ldots, n_{t-1}\text{, or the same of the loss}

    Args:
      inner: the optimizer to leave out; None is `optax.scale_by_adam()`.
      sigma: the number of standard deviations.
      window: the number of norms and losses; nothing is skipped in the first half.
      use_value: whether the loss is looked at, the extra argument `value` of `update`.
      options: further arguments of `optclip.skip`: those of `typing.SkipOptions`.

    Returns:
      A transformation around the whole optimizer, its clip and learning rate included.
      Unlike there NaN and inf never enter the window: one NaN makes OLMo skip as many
      steps as the window has. What was skipped enters it, as there, so that a huge
      spike hides the next ones for `window` steps; with `learn_skipped=False,
      max_consecutive=100` it does not. MaxText's and Levanter's rules have the same
      numbers.

    Raises:
      ValueError: at `update`, `value` is missing.

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

    Source: OLMo-core (allenai/OLMo-core), `SkipStepOptimizer`.
    """
    _validate.plain("sigma", sigma)
    _validate.flag("use_value", use_value)
    _validate.length("window", window)
    least = max(2, window // 2) - 1
    rule = thresholds.mean_plus_std(sigma, window, warmup=least, ddof=1)
    limits = {"max_norm": rule, "max_value": rule if use_value else None}
    return build(skip, options, _adam_if_none(inner), **limits)


def axlearn_skip(
    inner: optax.GradientTransformation | None = None,
    ratio: Number = 20.0,
    decay: Number = 0.99,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""AXLearn's rule: skip if the norm is above 20 times its running average.

    .. math:: \text{skip if } n_t > 20\,\hat\gamma_{t-1}; \quad \text{else }
        \gamma_t = 0.99\,\gamma_{t-1} + 0.01\,n_t, \quad
        \hat\gamma_t = \frac{\gamma_t}{1 - 0.99^t}

    Args:
      inner: the optimizer to leave out; None is `optax.scale_by_adam()`.
      ratio: the smallest of its multipliers, which decides.
      decay: the decay of the running average, which is debiased and does not learn from
        steps that were skipped.
      options: further arguments of `optclip.skip`: those of `typing.SkipOptions`.

    Returns:
      A transformation around the whole optimizer, its clip and learning rate included.
      Unlike there the first step is never skipped: AXLearn's average starts at 1, so
      gradients above 20 from the first step on are skipped for ever.

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

    Source: AXLearn (apple/axlearn), `skip_and_clip_by_global_norm` with
    `drop_norm_by_grad_norm_ema`.
    """
    rule = thresholds.ema(ratio, decay, warmup=0, start="debiased")
    all_options: dict[str, Any] = {"learn_skipped": False} | unwrapped(options)
    return build(skip, all_options, _adam_if_none(inner), max_norm=rule)


def megatron_skip(
    inner: optax.GradientTransformation | None = None,
    max_norm: ThresholdTree = math.inf,
    **options: Unpack[SkipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Megatron's rule: skip if the norm is above a fixed number, or not finite.

    .. math:: \text{skip if } \|g\| > c \text{ or } \|g\| \text{ is not finite}

    Args:
      inner: the optimizer to leave out; None is `optax.scale_by_adam()`.
      max_norm: the number, or an optax schedule; inf skips only what is not finite.
      options: further arguments of `optclip.skip`: those of `typing.SkipOptions`.

    Returns:
      A transformation around the whole optimizer, its clip and learning rate included.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.recipes.megatron_skip(optax.sgd(1.0), max_norm=10.0)
      >>> print(tx.update(jnp.array([11.0]), tx.init(jnp.zeros(1)))[0])
      [0.]

    Source: Megatron-LM (NVIDIA/Megatron-LM), `grad_norm_skip_threshold`.
    """
    return build(skip, options, _adam_if_none(inner), max_norm=max_norm)


def _adam_if_none(
    inner: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    return optax.scale_by_adam() if inner is None else inner
