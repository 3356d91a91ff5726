"""Clips of the whole tree by its norms so far, and of units by their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import optax

from optclip import scopes, thresholds
from optclip.recipes._recipe_options import build
from optclip.scopes._interface import AxesByLeaf
from optclip.transforms._interface import clip_by
from optclip.typing import ClipOptions, Number


def agc(
    ratio: Number = 0.01,
    min_norm: Number = 1e-3,
    *,
    stacked: Callable[[str], bool] | None = None,
    axis: AxesByLeaf | None = None,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Adaptive gradient clipping: each unit to a fraction of its own weights' norm.

    .. math:: G_i \leftarrow \lambda \frac{\max(\|W_i\|, \epsilon)}{\|G_i\|} G_i
        \quad \text{if } \|G_i\| > \lambda \max(\|W_i\|, \epsilon)

    A unit is all that feeds one output, which the layers of Flax, Haiku and Keras have
    on the last axis: norms are over all axes but that, and a leaf of rank 1 or 0 is one
    unit.

    - Equinox and haliax have outputs on the first axis, where the default clips the
      wrong slices. `axis=lambda path, shape: -1 if len(shape) == 2 else None` gives
      each output of their linear layers its own norm; see `scopes.units`.
    - An attention kernel `(in, heads, head_dim)` has one norm for each entry of
      `head_dim`, all heads together, although its outputs are on two axes.
      `axis=lambda path, shape: 0 if len(shape) == 3 and "out" not in path else None`
      gives each output its own; the kernel `out` has its outputs on the last axis.
    - An embedding `(vocabulary, features)` has one norm a feature, over the whole
      vocabulary. `axis=lambda path, shape: -1 if "embed" in path else None` gives each
      word its own.

    `optax.adaptive_grad_clip` does otherwise in two cases: it takes norms of rank 3
    over axis 0 alone, of the kernel "out" too; and a leaf with at most one
    axis longer than 1, such as a kernel `(1, 64)`, is one unit to it.

    Args:
      ratio: :math:`\lambda`, the fraction of its weights' norm that the gradient of a
        unit may have: a finite scalar of at least 0.
      min_norm: :math:`\epsilon`, what smaller norms of weights count as, so that a unit
        that starts at zero can move: a finite scalar of at least 0.
      stacked: a function of the path of a leaf, such as `"layers/dense/kernel"`, that
        returns whether its first axis counts layers, as `jax.lax.scan` over layers
        stacks them; each layer then has units of its own.
      axis: a function of path and shape of a leaf that returns the axes its norms are
        taken over, an int or a tuple; None for the rule above.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer; `update` must be given the parameters. The
      paper leaves out the last linear layer:
      `mask=optclip.by_path(lambda path: "head" not in path)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.agc()
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> updates, _ = tx.update(kernel, tx.init(kernel), kernel)
      >>> print(*(f"{norm:.3f}" for norm in jnp.linalg.norm(updates, axis=0)))
      0.050 0.005

    The rule alone, with what it does at the edges: `thresholds.relative_to_params`.

    Source: Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition
    Without Normalization*, 2021, arXiv:2102.06171, equation 3.
    """
    threshold = thresholds.relative_to_params(ratio, min_norm)
    return build(
        clip_by, options, threshold, over=scopes.units(stacked=stacked, axis=axis)
    )


def autoclip(
    q: Number = 0.1, window: int = 10_000, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""AutoClip: the global norm to a quantile of all norms so far, this one included.

    .. math:: c_t = \mathrm{quantile}_q(\|g_1\|, \ldots, \|g_t\|)

    Clips about 1 - q of the steps while norms keep their level: the paper's 0.1 clips
    nine steps in ten. To clip rare steps only, pass `q=0.9` or more.

    Args:
      q: the quantile, from 0 to 1; the paper's p over 100.
      window: how many norms are remembered; the paper remembers all.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer, with a state of 40 kB.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.autoclip(0.9)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 2.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [80.4]

    The rule alone, with what it does at the edges: `thresholds.quantile`.

    Source: Seetharaman, Wichern, Pardo, Le Roux, *AutoClip: Adaptive Gradient Clipping
    for Source Separation Networks*, 2020, arXiv:2007.14469; also QC-SGD, 2023,
    arXiv:2309.17316.
    """
    return build(clip_by, options, thresholds.quantile(q, window))


def zclip(
    z: Number = 2.5,
    decay: Number = 0.97,
    warmup: int = 25,
    max_norm: Number = 1.0,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""ZClip: spikes of the global norm, by their z-score, and `max_norm` always.

    .. math:: c = \mu + \frac{z^2}{s}\sigma \quad \text{if }
        s = \frac{\|g\| - \mu}{\sigma} > z

    Args:
      z: the z-score above which a norm is a spike, a finite scalar above 0.
      decay: the decay of the running mean and variance, from 0 to 1.
      warmup: the number of first steps, whose mean and variance are the first values.
      max_norm: a ceiling, the largest norm that any step is left with, in the warm-up
        too. Norms that are usually above it, as those of many models are above 1, are
        clipped to it in every step, and no spike is seen beside it: give a ceiling
        above your usual norms, or `float("inf")` for none, the paper's equations alone.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.zclip(max_norm=float("inf"))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in [1.0, 2.0] * 13 + [100.0]:
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.2f}")
      1.51

    The rule alone, with what it does at the edges: `thresholds.zscore`.

    Source: Kumar, Owen, Chowdhury, Güra, *ZClip: Adaptive Spike Mitigation for LLM
    Pre-Training*, 2025, arXiv:2504.02507, equations 4 to 9; `max_norm` from its code.
    """
    return build(
        clip_by, options, thresholds.zscore(z, decay, warmup, max_norm=max_norm)
    )


def mean_std_clip(
    k: Number = 3.0, window: int = 128, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""The global norm to the mean of the last norms plus k of their deviations.

    .. math:: c_t = \mathrm{mean} + k\,\mathrm{std} \text{ of }
        \|g_{t-128}\|, \ldots, \|g_{t-1}\|

    Args:
      k: the number of standard deviations.
      window: the number of norms.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer; Levanter has it behind Adam and its
      weight decay, before the learning rate.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.mean_std_clip(window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [5.]

    The rule alone, with what it does at the edges: `thresholds.mean_plus_std`.

    Source: Levanter (marin-community/levanter), `clip_update_by_historical_norm`.
    """
    return build(clip_by, options, thresholds.mean_plus_std(k, window))
