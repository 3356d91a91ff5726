"""Clipping of the tree by its past norms, and of units by their weights' norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import optax

from .. import _scopes as scopes
from .. import _thresholds as thresholds
from .._scopes import AxesByLeaf
from .._transforms import clip_by
from .._typing import ClipOptions, Number
from ._recipe_options import build


def agc(
    ratio: Number = 0.01,
    min_norm: Number = 1e-3,
    *,
    stacked: Callable[[str], bool] | None = None,
    axis: AxesByLeaf | None = None,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip each unit's gradient to a fraction of its weights' norm (AGC).

    Adaptive gradient clipping: `g = g * min(1, ratio * max(|w|, min_norm) / |g|)`,
    where `|g|` and `|w|` are the norms of a unit.

    A unit is the set of weights that feed one output. By default outputs are on the
    last axis, as in Flax, Haiku and Keras; a leaf with fewer than two axes is one unit.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.agc()
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> updates, _ = tx.update(kernel, tx.init(kernel), kernel)
      >>> print(*(f"{norm:.3f}" for norm in jnp.linalg.norm(updates, axis=0)))
      0.050 0.005

    Pass `axis` for layers that the default does not fit:

    - Linear layers of Equinox and haliax, with outputs on the first axis:
      `lambda path, shape: -1 if len(shape) == 2 else None`.
    - Attention kernels `(in, heads, head_dim)`, one norm per output of each head:
      `lambda path, shape: 0 if len(shape) == 3 and "out" not in path else None`.
    - Embeddings `(vocabulary, features)`, one norm per word instead of per feature:
      `lambda path, shape: -1 if "embed" in path else None`.

    Args:
      ratio: Maximum norm of a unit's gradient, as a fraction of its weights' norm.
      min_norm: Lower bound on the weights' norm, so that zero weights can train.
      stacked: Function of a leaf's path that returns whether its first axis counts
        layers, as for `jax.lax.scan` over layers. Default: none.
      axis: Function of a leaf's path and shape that returns the axes of its norms: an
        int, a tuple, or None for the default.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. `update` requires `params`. The
      paper excludes the last linear layer:
      `mask=optclip.by_path(lambda path: "head" not in path)`.

    See Also:
      `thresholds.relative_to_params` and `optclip.units`: the rule and the scope.
      `optax.adaptive_grad_clip` has other units for leaves of rank 3 and `(1, n)`.

    References:
      Brock, De, Smith and Simonyan, *High-Performance Large-Scale Image Recognition
      Without Normalization*, 2021, arXiv:2102.06171, equation 3.
    """
    threshold = thresholds.relative_to_params(ratio, min_norm)
    return build(
        clip_by, options, threshold, over=scopes.units(stacked=stacked, axis=axis)
    )


def autoclip(
    q: Number = 0.1, window: int = 10_000, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Clip the global norm to a quantile of the last 10,000 norms (AutoClip).

    The threshold is `quantile(norms, q)` of the last norms including this step. It
    clips about `1 - q` of the steps while norms are stationary: nine in ten with the
    paper's 0.1. To clip only rare spikes, pass `q=0.9` or more.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.autoclip(0.9)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 2.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [80.4]

    Args:
      q: Quantile, from 0 to 1; the paper's p divided by 100.
      window: Number of last norms to store; the paper stores all of them.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. Its state takes 4 bytes per
      norm of the window.

    See Also:
      `thresholds.quantile`, the rule.

    References:
      Seetharaman, Wichern, Pardo and Le Roux, *AutoClip: Adaptive Gradient Clipping for
      Source Separation Networks*, 2020, arXiv:2007.14469. QC-SGD, 2023,
      arXiv:2309.17316, also clips to a quantile.
    """
    return build(clip_by, options, thresholds.quantile(q, window))


def zclip(
    z: Number = 2.5,
    decay: Number = 0.97,
    warmup: int = 25,
    max_norm: Number = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip spikes of the global norm by z-score, and always at `max_norm` (ZClip).

    A spike has a z-score `s = (norm - mean) / std` above `z`. Its threshold is
    `mean + z**2 / s * std`: larger spikes are clipped to smaller norms.

    The default `max_norm` is a ceiling of 1 in units of the gradient norm. If the usual
    global norm exceeds 1, every step is clipped to 1, and SGD stalls. Pass
    `max_norm=float("inf")` to remove the ceiling, which the paper does not have.

    Without the ceiling, one huge norm in the warm-up hides later spikes: a norm of 3e5
    before norms of about 1 hides spikes of 10 for 730 steps. After a lasting tenfold
    rise, every step is clipped to the old level. `thresholds.quantile` recovers.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.zclip(max_norm=float("inf"))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in [1.0, 2.0] * 13 + [100.0]:
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.2f}")
      1.51

    Args:
      z: z-score above which a norm is a spike.
      decay: Decay of the running mean and variance, from 0 to 1.
      warmup: Number of first norms, whose mean and variance start the running ones.
      max_norm: Maximum norm of every step, warm-up included; inf for no ceiling.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer.

    See Also:
      `thresholds.zscore`, the rule.

    References:
      Kumar, Owen, Chowdhury and Güra, *ZClip: Adaptive Spike Mitigation for LLM
      Pre-Training*, 2025, arXiv:2504.02507, equations 4 to 9; `max_norm` from its code.
    """
    return build(
        clip_by, options, thresholds.zscore(z, decay, warmup, max_norm=max_norm)
    )


def mean_std_clip(
    k: Number = 3.0, window: int = 128, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Clip the global norm to the mean of past norms plus k deviations (Levanter).

    The threshold is `mean + k * std` of the last `window` norms before this step.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.mean_std_clip(window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [5.]

    Args:
      k: Number of standard deviations.
      window: Number of past norms.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. Levanter places it after Adam and
      weight decay, before the learning rate.

    See Also:
      `thresholds.mean_plus_std`, the rule.

    References:
      Levanter (marin-community/levanter), `clip_update_by_historical_norm`.
    """
    return build(clip_by, options, thresholds.mean_plus_std(k, window))
