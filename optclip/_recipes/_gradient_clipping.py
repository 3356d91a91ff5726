"""Methods that clip gradients before the optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import optax

from .. import _responses as responses
from .. import _scopes as scopes
from .. import _thresholds as thresholds
from .._arrays import _leaf, _validate
from .._arrays._numerics import as_array
from .._arrays._prefix import by_path
from .._arrays._types import Held, Mask, PyTree
from .._clip import lay_out
from .._scopes import AxesByLeaf
from .._thresholds import Named
from .._transforms import clip_by
from .._typing import ClipOptions, Labels, Number, NumberOrSchedule, Threshold
from ._recipe_options import build, scheduled, unwrapped


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
      options: Options of `clip_by`, except separate masks.

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
    return build(
        agc, clip_by, options, thresholds.relative_to_params(ratio, min_norm),
        over=scopes.units(stacked=stacked, axis=axis),
    )  # fmt: skip


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
      options: Options of `clip_by`, except separate masks.

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
    return build(autoclip, clip_by, options, thresholds.quantile(q, window))


def zclip(
    z: Number = 2.5,
    decay: Number = 0.97,
    warmup: int = 25,
    max_norm: Number | None = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip spikes of the global norm by z-score, and always at `max_norm` (ZClip).

    A spike has a z-score `s = (norm - mean) / std` above `z`. Its threshold is
    `mean + z**2 / s * std`: larger spikes are clipped to smaller norms.

    The default `max_norm` is a ceiling of 1 in units of the gradient norm. If the usual
    global norm exceeds 1, every step is clipped to 1, and SGD stalls. Pass
    `max_norm=None` to remove the ceiling, which the paper does not have.

    Without the ceiling, one huge norm in the warm-up hides later spikes: a norm of 3e5
    before norms of about 1 hides spikes of 10 for 730 steps. After a lasting tenfold
    rise, every step is clipped to the old level. `thresholds.quantile` recovers.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.zclip(max_norm=None)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in [1.0, 2.0] * 13 + [100.0]:
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.2f}")
      1.51

    Args:
      z: z-score above which a norm is a spike.
      decay: Decay of the running mean and variance, from 0 to 1.
      warmup: Number of first norms, whose mean and variance start the running ones.
      max_norm: Maximum norm of every step, warm-up included; None for no ceiling.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer.

    See Also:
      `thresholds.zscore`, the rule.

    References:
      Kumar, Owen, Chowdhury and Güra, *ZClip: Adaptive Spike Mitigation for LLM
      Pre-Training*, 2025, arXiv:2504.02507, equations 4 to 9; `max_norm` from its code.
    """
    return build(
        zclip, clip_by, options, thresholds.zscore(z, decay, warmup, max_norm=max_norm)
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
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer. Levanter places it after Adam and
      weight decay, before the learning rate.

    See Also:
      `thresholds.mean_plus_std`, the rule.

    References:
      Levanter (marin-community/levanter), `clip_update_by_historical_norm`.
    """
    return build(mean_std_clip, clip_by, options, thresholds.mean_plus_std(k, window))


def adagc(
    ratio: Number = 1.05,
    decay: Number = 0.98,
    warmup: int = 100,
    max_norm: Number | None = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip each leaf to a multiple of its running average norm (AdaGC).

    In each step `g = g * min(1, ratio * mean / |g|)`; then, with the clipped `g`,
    `mean = decay * mean + (1 - decay) * |g|`. During the warm-up the global norm is
    clipped to `max_norm` instead.

    The default `max_norm` is a ceiling of 1 in units of the gradient norm. Thresholds
    start at the norms clipped to it and grow by at most `(ratio - 1) * (1 - decay)` per
    step, 0.1%. If the usual global norm exceeds 1, nearly every step is clipped, and
    SGD stalls. Pass `max_norm=None` to remove the ceiling.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.adagc(warmup=1, max_norm=None)
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
      max_norm: Maximum global norm during the warm-up; None clips nothing in it.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer.

    See Also:
      `thresholds.ema`, the rule.

    References:
      Wang, Li, et al., *AdaGC: Improving Training Stability for Large Language Model
      Pretraining*, 2025, arXiv:2502.11034, algorithm 1.
    """
    return build(
        adagc, clip_by, options, thresholds.ema(ratio, decay, warmup, max_norm),
        over="leaf",
    )  # fmt: skip


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
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer. It does not clip the first step.

    See Also:
      `thresholds.ema`, the rule.

    References:
      OLMo (allenai/OLMo), `max_grad_norm_ratio`.
    """
    threshold = thresholds.ema(ratio, decay, warmup=0)
    chosen = {"eps": 1e-6} | unwrapped(options)
    return build(olmo_ratio, clip_by, chosen, threshold, over="leaf")


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
      options: Options of `clip_by`, except separate masks.

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
    _validate.plain_or_schedule("high", high, above=True)
    _validate.plain_or_schedule("low", low)
    response = responses.band(
        scheduled(operator.truediv, low, high), min_norm=min_norm,
        max_shrink=max_shrink, max_growth=max_growth,
    )  # fmt: skip
    labels = by_path(_module) if groups is None else groups
    threshold = thresholds.ema(high, decay, warmup=0, start="zero")
    return build(
        aggc, clip_by, options, threshold, over=scopes.groups(labels), response=response
    )


def _module(path: str) -> str:
    """Return the name of a parameter's module without its number."""
    keys = [key for key in path.split("/")[:-1] if not key.isdigit()] or ["all"]
    return keys[-1].rstrip("0123456789").rstrip("_") or "all"


def auto_s(
    max_norm: Threshold = 1.0, gamma: Number = 0.01, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Normalize the gradient, `g = max_norm * g / (norm + gamma)` (AUTO-S).

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.auto_s(gamma=1.0)
      >>> updates = jnp.array([0.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [0.  0.8]

    Args:
      max_norm: Limit of the norm: a number, an optax schedule or a rule.
      gamma: Number added to the norm; 0 gives the paper's AUTO-V.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer. The paper applies the formula to
      per-example gradients.

    References:
      Bu, Wang, Zha and Karypis, *Automatic Clipping: Differentially Private Deep
      Learning Made Easier and Stronger*, 2023, arXiv:2206.07136.
    """
    _validate.plain("gamma", gamma)
    return build(
        auto_s, clip_by, options, Named("max_norm", max_norm),
        response="normalize", eps=gamma,
    )  # fmt: skip


def sclip(
    c: NumberOrSchedule = 1.0,
    tau: NumberOrSchedule = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip each element smoothly, `y = c * y / sqrt(y**2 + tau)` (SClip).

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.sclip(c=2.0, tau=16.0)
      >>> updates = jnp.array([-3.0, 0.0, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.2  0.   1.2]

    Args:
      c: Limit of each element: a number or an optax schedule.
      tau: Squared scale of the curve: a number above 0 or an optax schedule. Small
        elements are multiplied by about `c / sqrt(tau)`.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it before the optimizer. The recorded threshold is
      `sqrt(tau)`.

    References:
      Yu, Jakovetić and Kar, *Smoothed Gradient Clipping and Error Feedback for
      Distributed Optimization under Heavy-Tailed Noise*, 2023, arXiv:2310.16920.
    """
    _validate.plain_or_schedule("c", c)
    _validate.plain_or_schedule("tau", tau, above=True)
    edge = scheduled(lambda t: jnp.sqrt(as_array(t)), tau)
    factor = scheduled(lambda c, t: as_array(c) / jnp.sqrt(as_array(t)), c, tau)
    clip = build(sclip, clip_by, options, edge, over="element", response="smooth")
    scale = _scale_by(factor, unwrapped(options).get("mask"))
    return optax.with_extra_args_support(optax.chain(clip, scale))


def _scale_by(
    factor: NumberOrSchedule, mask: Mask | None
) -> optax.GradientTransformation:
    """Multiply the floating-point leaves of the mask by a number or a schedule."""
    # optax.scale would not keep the dtype.
    fixed, held_mask = Held(factor), Held(mask)
    at: Any = factor if callable(factor) else lambda step: fixed.value
    scale = optax.scale_by_schedule(at)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        layout = lay_out(scopes.LEAF, updates, (held_mask.value, None, None))
        # optax would also scale the indices of a BCOO leaf.
        arrays: Any = {i: jnp.asarray(leaf.like) for i, leaf, _ in layout.scaled}
        arrays, state = scale.update(arrays, state)
        scaled: dict[int, object] = {
            i: _leaf.with_data(leaf.value, arrays[i])
            if leaf.matrix is not None
            else arrays[i]
            for i, leaf, _ in layout.scaled
        }
        return layout.rebuild(scaled), state

    return optax.GradientTransformation(scale.init, update_fn)
