"""Clipping of each leaf or group by its running average norm."""

from __future__ import annotations

import operator
from typing import Any, Unpack

import optax

from .. import _responses as responses
from .. import _scopes as scopes
from .. import _thresholds as thresholds
from .._arrays import _validate
from .._arrays._prefix import by_path
from .._transforms import clip_by
from .._typing import ClipOptions, Labels, Number, NumberOrSchedule
from ._recipe_options import build, scheduled, unwrapped


def adagc(
    ratio: Number = 1.05,
    decay: Number = 0.98,
    warmup: int = 100,
    max_norm: Number = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip each leaf to a multiple of its running average norm (AdaGC).

    In each step `g = g * min(1, ratio * mean / |g|)`; then, with the clipped `g`,
    `mean = decay * mean + (1 - decay) * |g|`. During the warm-up the global norm is
    clipped to `max_norm` instead.

    The default `max_norm` is a ceiling of 1 in units of the gradient norm. Thresholds
    start at the norms clipped to it and grow by at most `(ratio - 1) * (1 - decay)` per
    step, 0.1%. If the usual global norm exceeds 1, nearly every step is clipped, and
    SGD stalls. Pass `max_norm=float("inf")` to remove the ceiling.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.adagc(warmup=1, max_norm=float("inf"))
      >>> state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
      >>> for a, b in ((3.0, 4.0), (3.0, 400.0)):
      ...     grads = {"a": jnp.array([a]), "b": jnp.array([b])}
      ...     updates, state = tx.update(grads, state)
      >>> print(updates["a"], updates["b"])
      [3.] [4.2]

    Args:
      ratio: Maximum norm of a leaf, as a multiple of its running average.
      decay: Decay of the running average, from 0 to 1.
      warmup: Number of first steps, clipped by global norm; a leaf's smallest clipped
        norm in them starts its average.
      max_norm: Maximum global norm during the warm-up; inf clips nothing in it.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer.

    See Also:
      `thresholds.ema`, the rule.

    References:
      Wang, Li, et al., *AdaGC: Improving Training Stability for Large Language Model
      Pretraining*, 2025, arXiv:2502.11034, algorithm 1.
    """
    threshold = thresholds.ema(ratio, decay, warmup, max_norm)
    return build(clip_by, options, threshold, over="leaf")


def olmo_ratio(
    ratio: NumberOrSchedule = 1.5, decay: Number = 0.95, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Clip each leaf to a multiple of its running average norm, without warm-up (OLMo).

    In each step `g = g * min(1, ratio * mean / (|g| + 1e-6))`, and then, with the
    clipped `g`, `mean = decay * mean + (1 - decay) * |g|`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.olmo_ratio(ratio=2.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [2.]

    Args:
      ratio: Maximum norm of a leaf, as a multiple of its running average: a number or
        an optax schedule. OLMo's `max_grad_norm_ratio` has no default.
      decay: Decay of the running average. OLMo uses the larger of Adam's two decays.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. It does not clip the first step.

    See Also:
      `thresholds.ema`, the rule.

    References:
      OLMo (allenai/OLMo), `max_grad_norm_ratio`.
    """
    threshold = thresholds.ema(ratio, decay, warmup=0)
    all_options: dict[str, Any] = {"eps": 1e-6} | unwrapped(options)
    return build(clip_by, all_options, threshold, over="leaf")


def aggc(
    groups: Labels | None = None,
    *,
    high: NumberOrSchedule = 0.6,
    low: NumberOrSchedule = 0.95,
    decay: Number = 0.95,
    min_norm: Number = 0.01,
    max_shrink: Number = 0.9,
    max_growth: Number = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Scale each group's norm into a band around its running average (AGGC).

    Norms above the band shrink; with `max_growth` above 1, norms below it grow::

        upper = high * mean
        lower = max(min_norm, low * mean)
        k = max(upper / norm, max_shrink) if norm > upper
        k = min(lower / norm, max_growth) if norm < lower
        k = 1 otherwise
        mean = decay * mean + (1 - decay) * k * norm

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.aggc()
      >>> grads = {"dense_0": {"w": jnp.ones(9)}, "dense_1": {"w": jnp.ones(16)}}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(optclip.metrics(state)["clip/norm/dense"])
      5.0

    Args:
      groups: Label of each leaf: a tree of strings or a function. Default: the name of
        the leaf's module without its number, so that `dense_0` and `dense_1` are one
        group.
      high: Upper edge of the band as a fraction of the running average: a number above
        0 or an optax schedule.
      low: Lower edge as a fraction of the running average: a number or a schedule.
      decay: Decay of the running average, which starts at 0.
      min_norm: Minimum of the lower edge.
      max_shrink: Smallest factor for a large norm.
      max_growth: Largest factor for a small norm; 1 forbids growth. The authors' GRPO
        scripts use `high=0.7, low=0.98, decay=0.99, max_growth=1.1`.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. Unlike the authors' code, it does
      not change the first step, which has no average yet.

    See Also:
      `thresholds.ema` and `responses.band`: the rule and the response.

    References:
      Li, Wu and Chang, *AGGC: Adaptive Group Gradient Clipping for Stabilizing Large
      Language Model Training*, 2026, arXiv:2601.11864. Defaults from its LoRA scripts,
      which also schedule both edges.
    """
    for name, value in (("high", high), ("low", low)):
        if not callable(value):
            _validate.plain(name, value, above=name == "high")
    response = responses.band(
        scheduled(operator.truediv, low, high), min_norm=min_norm,
        max_shrink=max_shrink, max_growth=max_growth,
    )  # fmt: skip
    labels = by_path(_module) if groups is None else groups
    threshold = thresholds.ema(high, decay, warmup=0, start="zero")
    return build(
        clip_by, options, threshold, over=scopes.groups(labels), response=response
    )


def _module(path: str) -> str:
    """Return the name of a parameter's module without its number."""
    keys = [key for key in path.split("/")[:-1] if not key.isdigit()] or ["all"]
    return keys[-1].rstrip("0123456789").rstrip("_") or "all"
