"""Clips of each leaf or group by the running average of its own norm."""

from __future__ import annotations

import operator
from typing import Any, Unpack

import optax

from optclip import responses, scopes, thresholds
from optclip._arrays import _validate
from optclip._arrays._prefix import by_path
from optclip.recipes._recipe_options import build, scheduled, unwrapped
from optclip.transforms._interface import clip_by
from optclip.typing import ClipOptions, Labels, Number, NumberOrSchedule


def adagc(
    ratio: Number = 1.05,
    decay: Number = 0.98,
    warmup: int = 100,
    max_norm: Number = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGC: each leaf to a multiple of the running average of its own clipped norm.

    .. math:: g \leftarrow g \min(1, \lambda\gamma_{t-1} / \|g\|), \qquad
        \gamma_t = \beta\gamma_{t-1} + (1 - \beta)\|g\|

    Args:
      ratio: :math:`\lambda`, how many times its average the norm of a leaf may be.
      decay: :math:`\beta`, the decay of the running average, from 0 to 1.
      warmup: the number of first steps, which are clipped by their global norm; the
        smallest norm that a leaf is left with in them is its first :math:`\gamma`.
      max_norm: the global norm that the warm-up clips to.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.adagc(warmup=1, max_norm=5.0)
      >>> state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
      >>> for a, b in ((3.0, 4.0), (3.0, 400.0)):
      ...     grads = {"a": jnp.array([a]), "b": jnp.array([b])}
      ...     updates, state = tx.update(grads, state)
      >>> print(updates["a"], updates["b"])
      [3.] [4.2]

    The rule alone, with what it does at the edges: `thresholds.ema`.

    Source: Wang, Li, et al., *AdaGC: Improving Training Stability for Large Language
    Model Pretraining*, 2025, arXiv:2502.11034, algorithm 1.
    """
    threshold = thresholds.ema(ratio, decay, warmup, max_norm)
    return build(clip_by, options, threshold, over="leaf")


def olmo_ratio(
    ratio: NumberOrSchedule = 1.5, decay: Number = 0.95, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""OLMo's ratio clip: each leaf to a multiple of its running clipped norm.

    .. math:: g \leftarrow g \min(1, r\gamma_{t-1} / (\|g\| + 10^{-6})), \qquad
        \gamma_t = \beta\gamma_{t-1} + (1 - \beta)\|g\|

    Args:
      ratio: r, `max_grad_norm_ratio` there, where it has no default.
      decay: :math:`\beta`, the larger of Adam's two there.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer. The first step is not clipped; a leaf
      without gradient does not lower its average.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.olmo_ratio(ratio=2.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [2.]

    The rule alone, with what it does at the edges: `thresholds.ema`.

    Source: OLMo (allenai/OLMo), `max_grad_norm_ratio`.
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
    r"""AGGC: each group into a band around its running norm; small norms may grow.

    .. math:: U = \alpha_{high} S, \quad L = \max(m, \alpha_{low} S), \quad
        k = \begin{cases} \max(U / n, 0.9) & n > U \\ \min(L / n, g) & n < L
        \\ 1 & \text{otherwise} \end{cases}, \quad
        S \leftarrow \beta S + (1 - \beta) k n

    Args:
      groups: the label of each leaf: a tree of strings with the structure of the
        updates, a prefix of it, or a function that makes one of the updates, such as
        `optclip.by_path(...)`; None groups by the module's name, the last but one key
        of each path without its number: all `dense_0` and `dense_1`.
      high: :math:`\alpha_{high}`, the upper edge of the band as a fraction of the
        running norm: a number above 0 or an optax schedule.
      low: :math:`\alpha_{low}`, the lower edge as a fraction of the running norm: a
        number of at least 0 or an optax schedule.
      decay: :math:`\beta` of the running norm, which starts at 0.
      min_norm: m, which the lower edge is never under.
      max_shrink: the smallest factor that a large norm is multiplied by.
      max_growth: the largest factor; 1, which their LoRA scripts have, lets none grow.
        Their GRPO scripts do: `high=0.7, low=0.98, decay=0.99, max_growth=1.1`.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer. Unlike in the authors' code the first step,
      of which nothing is known, is left alone, and so is a group without gradient.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.aggc()
      >>> grads = {"dense_0": {"w": jnp.ones(9)}, "dense_1": {"w": jnp.ones(16)}}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(optclip.metrics(state)["clip/norm/dense"])
      5.0

    The rule alone, with what it does at the edges: `thresholds.ema`.

    Source: Li, Wu, Chang, *AGGC: Adaptive Group Gradient Clipping for Stabilizing Large
    Language Model Training*, 2026, arXiv:2601.11864; numbers from its LoRA scripts,
    which also move both edges over the training: give schedules.
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
    """The name of the module a parameter is in, without its number."""
    keys = [key for key in path.split("/")[:-1] if not key.isdigit()] or ["all"]
    return keys[-1].rstrip("0123456789").rstrip("_") or "all"
