"""Clipping with fixed thresholds, and error feedback."""

from __future__ import annotations

import operator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaf, _leaves, _prefix, _validate
from .._arrays._numerics import as_array
from .._arrays._types import Held, Mask, PyTree
from .._thresholds import Named
from .._transforms import clip_by, clip_by_value
from .._typing import ClipOptions, Number, NumberOrSchedule, Threshold
from .._wrappers import with_error_feedback
from ._recipe_options import build, scheduled, unwrapped


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
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. The paper applies the formula to
      per-example gradients.

    References:
      Bu, Wang, Zha and Karypis, *Automatic Clipping: Differentially Private Deep
      Learning Made Easier and Stronger*, 2023, arXiv:2206.07136.
    """
    _validate.plain("gamma", gamma)
    threshold = Named("max_norm", max_norm)
    return build(clip_by, options, threshold, response="normalize", eps=gamma)


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
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it before the optimizer. The recorded threshold is
      `sqrt(tau)`.

    References:
      Yu, Jakovetić and Kar, *Smoothed Gradient Clipping and Error Feedback for
      Distributed Optimization under Heavy-Tailed Noise*, 2023, arXiv:2310.16920.
    """
    for name, value in (("c", c), ("tau", tau)):
        if not callable(value):
            _validate.plain(name, value, above=name == "tau")
    edge = scheduled(lambda t: jnp.sqrt(as_array(t)), tau)
    factor = scheduled(lambda c, t: as_array(c) / jnp.sqrt(as_array(t)), c, tau)
    clip = build(clip_by, options, edge, over="element", response="smooth")
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
        del params
        flat = _leaves.flatten(updates)
        live = flat.clippable()
        masked = _prefix.spread_mask("mask", held_mask.value, flat, live)
        chosen = map(operator.and_, masked, live)
        places = [i for i, is_chosen in enumerate(chosen) if is_chosen]
        # optax would also scale the indices of a BCOO leaf.
        arrays = [jnp.asarray(_leaves.values(flat.leaves[i])) for i in places]
        scaled, state = scale.update(arrays, state)
        leaves = list(flat.leaves)
        for i, x in zip(places, jax.tree.leaves(scaled), strict=True):
            leaf = leaves[i]
            leaves[i] = _leaf.with_data(leaf, x) if _leaves.is_sparse(leaf) else x
        return flat.rebuild(leaves), state

    return optax.GradientTransformation(scale.init, update_fn)


def uclip(
    clip: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Add the part that clipping removed to the next gradient (U-Clip).

    The residual `r` starts at 0, and in each step `u = clip(g + r)`, then
    `r = g + r - u`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.uclip()
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (2.5, 0.0):
      ...     updates, state = tx.update(jnp.array([size]), state)
      >>> print(updates, state.feedback_residual)
      [1.] [0.5]

    Args:
      clip: The clipping transformation to wrap. Default: `clip_by_value(1.0)`.

    Returns:
      The transformation `optclip.with_error_feedback(clip)`; place it before the
      optimizer.

    References:
      Elesedy and Hutter, *U-Clip: On-Average Unbiased Stochastic Gradient Clipping*,
      2023, arXiv:2302.02971.
    """
    return with_error_feedback(clip_by_value(1.0) if clip is None else clip)
