"""Clips whose threshold comes from the parameters or from the norms so far."""

import operator
from collections.abc import Callable
from typing import Any

import optax

from optclip import _validate, responses, scopes, thresholds
from optclip._engine import clip_by
from optclip._trees import by_path
from optclip.recipes._options import given, through


def agc(
    ratio: Any = 0.01,
    min_norm: Any = 1e-3,
    *,
    stacked: Callable[[str], bool] | None = None,
    axis: Callable[[str, tuple[int, ...]], Any] | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Adaptive gradient clipping: each unit to a share of its own weights' norm.

    .. math:: G_i \leftarrow \lambda \frac{\max(\|W_i\|, \epsilon)}{\|G_i\|} G_i
        \quad \text{if } \|G_i\| > \lambda \max(\|W_i\|, \epsilon)

    Args:
      ratio: :math:`\lambda`.
      min_norm: :math:`\epsilon`.
      stacked: which leaves hold a layer in each entry of their first axis, by path.
      axis: over which axes a unit goes, by path and shape; see `optclip.units`.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation; `update` must be given the parameters. The paper leaves out the
      last linear layer: `clip_mask=optclip.by_path(lambda path: "head" not in path)`.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.agc()
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> updates, _ = tx.update(kernel, tx.init(kernel), kernel)
      >>> print(*(f"{norm:.3f}" for norm in jnp.linalg.norm(updates, axis=0)))
      0.050 0.005

    Source: Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition
    Without Normalization*, 2021, arXiv:2102.06171, equation 3.
    """
    threshold = thresholds.relative_to_params(ratio, min_norm)
    return clip_by(
        threshold, over=scopes.units(stacked=stacked, axis=axis), **given(options)
    )


def autoclip(
    q: Any = 0.1, window: int = 10_000, **options: Any
) -> optax.GradientTransformationExtraArgs:
    r"""AutoClip: the global norm to a quantile of all norms so far, this one included.

    .. math:: c_t = \mathrm{quantile}_q(\|g_1\|, \ldots, \|g_t\|)

    Args:
      q: the quantile, from 0 to 1; the paper's p over 100.
      window: how many norms are remembered; the paper remembers all.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation with a state of 40 kB.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.autoclip()
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 2.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [1.2]

    Source: Seetharaman, Wichern, Pardo, Le Roux, *AutoClip: Adaptive Gradient Clipping
    for Source Separation Networks*, 2020, arXiv:2007.14469; also QC-SGD, 2023,
    arXiv:2309.17316.
    """
    return clip_by(thresholds.quantile(q, window), **given(options))


def zclip(
    z: Any = 2.5,
    decay: Any = 0.97,
    warmup: int = 25,
    max_norm: Any = 1.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""ZClip: spikes of the global norm, by their z-score, and `max_norm` always.

    .. math:: c = \mu + \frac{z^2}{s}\sigma \quad \text{if }
        s = \frac{\|g\| - \mu}{\sigma} > z

    Args:
      z: the z-score above which a norm is a spike.
      decay: of the running mean and variance.
      warmup: so many steps give their first values.
      max_norm: no norm goes above it, in the warm-up too; inf for the paper's equations
        alone.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.zclip(max_norm=float("inf"))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in [1.0, 2.0] * 13 + [100.0]:
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.2f}")
      1.51

    Source: Kumar, Owen, Chowdhury, Güra, *ZClip: Adaptive Spike Mitigation for LLM
    Pre-Training*, 2025, arXiv:2504.02507, equations 4 to 9; `max_norm` from its code.
    """
    return clip_by(
        thresholds.zscore(z, decay, warmup, max_norm=max_norm), **given(options)
    )


def adagc(
    ratio: Any = 1.05,
    decay: Any = 0.98,
    warmup: int = 100,
    max_norm: Any = 1.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGC: each leaf to a multiple of the running average of its own clipped norm.

    .. math:: g \leftarrow g \min(1, \lambda\gamma_{t-1} / \|g\|), \qquad
        \gamma_t = \beta\gamma_{t-1} + (1 - \beta)\|g\|

    Args:
      ratio: :math:`\lambda`.
      decay: :math:`\beta`.
      warmup: so many steps are clipped by their global norm.
      max_norm: to this.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.adagc(warmup=1, max_norm=5.0)
      >>> state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
      >>> for a, b in ((3.0, 4.0), (3.0, 400.0)):
      ...     grads = {"a": jnp.array([a]), "b": jnp.array([b])}
      ...     updates, state = tx.update(grads, state)
      >>> print(updates["a"], updates["b"])
      [3.] [4.2]

    Source: Wang, Li, et al., *AdaGC: Improving Training Stability for Large Language
    Model Pretraining*, 2025, arXiv:2502.11034, algorithm 1.
    """
    threshold = thresholds.ema(ratio, decay, warmup, max_norm)
    return clip_by(threshold, over=scopes.LEAF, **given(options))


def mean_std_clip(
    k: Any = 3.0, window: int = 128, **options: Any
) -> optax.GradientTransformationExtraArgs:
    r"""The global norm to the mean of the last norms plus k of their deviations.

    Args:
      k: the number of standard deviations.
      window: the number of norms.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.mean_std_clip(window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [5.]

    Source: Levanter (stanford-crfm/levanter), `clip_update_norm`.
    """
    return clip_by(thresholds.mean_plus_std(k, window), **given(options))


def olmo_ratio(
    ratio: Any = 1.5, decay: Any = 0.95, **options: Any
) -> optax.GradientTransformationExtraArgs:
    r"""OLMo's ratio clip: each leaf to a multiple of its running clipped norm.

    .. math:: g \leftarrow g \min(1, r\gamma_{t-1} / (\|g\| + 10^{-6})), \qquad
        \gamma_t = \beta\gamma_{t-1} + (1 - \beta)\|g\|

    Args:
      ratio: r, `max_grad_norm_ratio` there, where it has no default.
      decay: :math:`\beta`, the larger of Adam's two there.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation. The first step is not clipped; a leaf without gradient does not
      lower its average.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.olmo_ratio(ratio=2.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [2.]

    Source: OLMo (allenai/OLMo), `max_grad_norm_ratio`.
    """
    threshold = thresholds.ema(ratio, decay, warmup=0)
    all_options: dict[str, Any] = {"eps": 1e-6} | given(options)
    return clip_by(threshold, over=scopes.LEAF, **all_options)


def aggc(
    groups: Any = None,
    *,
    high: Any = 0.6,
    low: Any = 0.95,
    decay: Any = 0.95,
    min_norm: Any = 0.01,
    max_shrink: Any = 0.9,
    max_growth: Any = 1.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""AGGC: each group into a band around its running norm; small norms may grow.

    .. math:: U = \alpha_{high} S, \quad L = \max(m, \alpha_{low} S), \quad
        k = \begin{cases} \max(U / n, 0.9) & n > U \\ \min(L / n, g) & n < L
        \\ 1 & \text{otherwise} \end{cases}, \quad
        S \leftarrow \beta S + (1 - \beta) k n

    Args:
      groups: labels as for `optclip.groups`; None groups by the module's name, the last
        but one key of each path without its number: all `dense_0` and `dense_1`.
      high: :math:`\alpha_{high}`, a number above 0 or an optax schedule.
      low: :math:`\alpha_{low}`, likewise.
      decay: :math:`\beta` of the running norm, which starts at 0.
      min_norm: m.
      max_shrink: the smallest factor.
      max_growth: the largest factor; 1, as in their LoRA scripts, lets none grow. Their
        GRPO scripts do: `high=0.7, low=0.98, decay=0.99, max_growth=1.1`.
      options: further arguments of `clip_by`, such as `nonfinite` or `clip_mask`.

    Returns:
      A transformation. Unlike in the authors' code the first step, of which nothing is
      known, is left alone, and so is a group without gradient.

    Raises:
      TypeError, ValueError: an argument is of another kind or out of range.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.aggc()
      >>> grads = {"dense_0": {"w": jnp.ones(9)}, "dense_1": {"w": jnp.ones(16)}}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(optclip.metrics(state)["clip/norm/dense"])
      5.0

    Source: Li, Wu, Chang, *AGGC: Adaptive Group Gradient Clipping for Stabilizing Large
    Language Model Training*, 2026, arXiv:2601.11864; numbers from its LoRA scripts,
    which also move both edges over the training: give schedules.
    """
    for name, value in (("high", high), ("low", low)):
        if not callable(value):
            _validate.plain(name, value, above=name == "high")
    response = responses.band(
        through(operator.truediv, low, high), min_norm=min_norm, max_shrink=max_shrink,
        max_growth=max_growth,
    )  # fmt: skip
    labels = by_path(_module) if groups is None else groups
    threshold = thresholds.ema(high, decay, warmup=0, start="zero")
    return clip_by(
        threshold, over=scopes.groups(labels), response=response, **given(options)
    )


def _module(path: str) -> str:
    """The name of the module a parameter is in, without its number."""
    keys = [key for key in path.split("/")[:-1] if not key.isdigit()] or ["all"]
    return keys[-1].rstrip("0123456789").rstrip("_") or "all"
