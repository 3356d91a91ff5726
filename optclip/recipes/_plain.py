"""Clips with fixed thresholds, and error feedback."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
import optax

from optclip._arrays import _validate
from optclip.recipes._recipe_options import build, scheduled
from optclip.thresholds._interface import Named
from optclip.transforms import clip_by_value
from optclip.transforms._interface import clip_by
from optclip.typing import ClipOptions, Number, NumberOrSchedule, Threshold
from optclip.wrappers import with_error_feedback


def auto_s(
    max_norm: Threshold = 1.0, gamma: Number = 0.01, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""Automatic clipping: always the same length, but where that is below gamma.

    .. math:: g \leftarrow R \frac{g}{\|g\| + \gamma}

    Args:
      max_norm: R, the norm that large gradients are left with.
      gamma: :math:`\gamma`, which is added to the norm; 0 is the paper's AUTO-V.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer, of one gradient; the paper's are those of
      single examples.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.auto_s(gamma=1.0)
      >>> updates = jnp.array([0.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [0.  0.8]

    Source: Bu, Wang, Zha, Karypis, *Automatic Clipping: Differentially Private Deep
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
    r"""SClip: each element by a smooth curve with the limit c.

    .. math:: y \leftarrow c_t \frac{y}{\sqrt{y^2 + \tau_t}}

    Args:
      c: the limit, a number or an optax schedule.
      tau: :math:`\tau`, a number above 0 or an optax schedule: small elements are
        multiplied by :math:`c / \sqrt\tau`.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation before the optimizer: a smooth clip at :math:`\sqrt\tau`, then a
      scale.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.sclip(c=2.0, tau=16.0)
      >>> updates = jnp.array([-3.0, 0.0, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.2  0.   1.2]

    Source: Yu, Jakovetić, Kar, *Smoothed Gradient Clipping and Error Feedback for
    Distributed Optimization under Heavy-Tailed Noise*, 2023, arXiv:2310.16920.
    """
    for name, value in (("c", c), ("tau", tau)):
        if not callable(value):
            _validate.plain(name, value, above=name == "tau")
    edge = scheduled(jnp.sqrt, tau)
    scale = scheduled(lambda limit, t: limit / jnp.sqrt(t), c, tau)
    clip = build(clip_by, options, edge, over="element", response="smooth")
    # A number is passed as a schedule too, which keeps the dtype of the updates.
    at: Any = scale if callable(scale) else lambda step: scale
    scaled = optax.scale_by_schedule(at)
    return optax.with_extra_args_support(optax.chain(clip, scaled))


def uclip(
    clip: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""U-Clip: what was cut off is added to the next gradient, before it is clipped.

    .. math:: u_t = \mathrm{clip}(g_t + \Delta_t), \qquad
        \Delta_{t+1} = g_t + \Delta_t - u_t

    Args:
      clip: any clip, an optax transformation; None is `clip_by_value(1.0)`.

    Returns:
      A transformation before the optimizer: `optclip.with_error_feedback(clip)`.

    Raises:
      TypeError: `clip` is not an optax transformation.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.uclip()
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (2.5, 0.0):
      ...     updates, state = tx.update(jnp.array([size]), state)
      >>> print(updates, state.feedback_residual)
      [1.] [0.5]

    Source: Elesedy, Hutter, *U-Clip: On-Average Unbiased Stochastic Gradient Clipping*,
    2023, arXiv:2302.02971.
    """
    return with_error_feedback(clip_by_value(1.0) if clip is None else clip)
