"""Methods that limit the step itself, by the moments or the parameters behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from optclip._arrays import _batching, _leaves, _validate
from optclip._arrays._numerics import ratio
from optclip._arrays._types import Leaf, PyTree
from optclip.recipes._recipe_options import build, refuse_behind_moments
from optclip.thresholds import Seen
from optclip.transforms._interface import clip_by
from optclip.typing import ClipOptions, MomentClipOptions, Number
from optclip.wrappers import clip_after


@dataclasses.dataclass(frozen=True)
class _UnitQuotient:
    """The norm of the updates at which the norm of `quotients` is 1.

    Quotients are taken as proportional to the updates, as those by parameters are.
    """

    quotients: Callable[[Seen], PyTree]

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        excess = seen.measure(self.quotients(seen))
        return _batching.each(_allowed, seen.norm, seen.finite, excess), memory


def _allowed(norm: jax.Array, finite: jax.Array, excess: jax.Array) -> jax.Array:
    one, inf = jnp.ones_like(norm), jnp.full_like(norm, jnp.inf)
    none = excess == 0
    allowed = jnp.where(none, inf, ratio(norm, jnp.where(none, one, excess)))
    # A norm below 2**-60 reads 0; a threshold of 0 would clip what is allowed.
    off = ~finite | ((norm == 0) & (excess <= 1))
    return jnp.where(off, inf, allowed)


def stable_adamw(
    b1: Number = 0.9,
    b2: Number = 0.99,
    eps: Number = 1e-6,
    weight_decay: float | jax.Array = 0.0,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""StableAdamW: AdamW, slower in a leaf whose second moment is out of date.

    .. math:: u \leftarrow \frac{u}{\max(1, RMS)}, \qquad
        RMS = \sqrt{\mathrm{mean}\frac{g^2}{\max(\hat v, \epsilon^2)}}

    Args:
      b1: the decay of Adam's first moment.
      b2: the decay of Adam's second moment.
      eps: Adam's, and :math:`\epsilon` above.
      weight_decay: AdamW's; `update` must then be given the parameters.
      options: further arguments of `clip_by`: those of `typing.MomentClipOptions`.

    Returns:
      A transformation in place of `optax.scale_by_adam` and `add_decayed_weights`: a
      learning rate follows. Its record has the norm of each step, and the largest that
      it is allowed.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_adamw()
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size]), state, jnp.zeros(1))
      >>> print(f"{optclip.metrics(state)['clip/coefficient']:.2f} {updates[0]:.2f}")
      0.58 0.37

    Source: Wortsman et al., *Stable and low-precision training for large-scale
    vision-language models*, 2023, arXiv:2304.13013, algorithm 2.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("eps", eps)
    _validate.plain("weight_decay", weight_decay)
    refuse_behind_moments("stable_adamw", options)

    def over_second_moment(seen: Seen) -> PyTree:
        count, nu = (
            optax.tree.get(seen.extra["inner_state"], name) for name in ("count", "nu")
        )
        log = jnp.log(jnp.asarray(b2, jnp.float32))
        correction = -jnp.expm1(count.astype(jnp.float32) * log)

        def quotient(g: Leaf, v: Leaf) -> Leaf:
            if not _leaves.is_floating(g):
                return g
            wide = _leaves.widen(jnp.asarray(g))
            root = jnp.sqrt(v.astype(jnp.abs(wide).dtype) / correction)
            # v may be 0. Bounded, the norm is finite and its inverse not subnormal.
            return jnp.minimum(_quotient(wide, jnp.maximum(root, eps)), 2.0**60)

        return jax.tree.map(quotient, seen.extra["gradients"], nu)

    adam = optax.scale_by_adam(b1, b2, eps)
    rule = _UnitQuotient(over_second_moment)
    clip = build(clip_by, options, rule, over="leaf", norm="rms")
    if _validate.concrete(weight_decay) != 0:
        adam = optax.chain(adam, optax.add_decayed_weights(weight_decay))
    return clip_after(optax.masked(adam, _leaves.are_floating), clip)


def clippy(
    relative: Number = 0.5, absolute: Number = 0.01, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""Clippy: no element of a parameter changes by more than a fraction of itself.

    .. math:: \Delta \leftarrow \Delta \min\left(1, \min_i
        \frac{\lambda_{rel}|w_i| + \lambda_{abs}}{|\Delta_i|}\right)

    Args:
      relative: :math:`\lambda_{rel}`; 0.1 in TensorFlow Recommenders.
      absolute: :math:`\lambda_{abs}`, by which a parameter of 0 may change; 1e-7 there.
      options: further arguments of `clip_by`: those of `typing.ClipOptions`.

    Returns:
      A transformation of the steps themselves: it comes last, after the learning rate.
      `update` must be given the parameters. Its record has the largest element of each
      step, and the largest that it is allowed.

    Raises:
      ValueError: at `update`, `params` is None.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optax.sgd(1.0), optclip.recipes.clippy(absolute=0.0))
      >>> params = jnp.array([1.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([2.0, 2.0]), tx.init(params), params)
      >>> print(updates)
      [-0.5 -0.5]

    Source: Tang et al., *Improving Training Stability for Multitask Ranking Models in
    Recommender Systems*, 2023, arXiv:2302.09178; numbers from ports of it.
    """
    _validate.plain("relative", relative)
    _validate.plain("absolute", absolute)

    def over_allowed(seen: Seen) -> PyTree:
        _validate.params_given(seen.params, "recipes.clippy")

        def quotient(u: Leaf, w: Leaf) -> Leaf:
            if not _leaves.is_floating(u):
                return u
            size = jnp.abs(_leaves.widen(jnp.asarray(w)))
            allowed = jnp.asarray(relative * size + absolute, size.dtype)
            return _quotient(_leaves.widen(jnp.asarray(u)), allowed)

        return jax.tree.map(quotient, seen.updates, seen.params)

    rule = _UnitQuotient(over_allowed)
    return build(clip_by, options, rule, over="leaf", norm="inf")


def _quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`|x| / divisor`; a very large number where that is 0 and x is not."""
    size = jnp.abs(x)
    none = divisor == 0
    # A divisor of 0 is replaced by 1, so that the quotient and its derivative are not
    # NaN.
    quotient = ratio(size, jnp.where(none, jnp.ones_like(divisor), divisor))
    largest = jnp.asarray(jnp.finfo(size.dtype).max / 2, size.dtype)
    return jnp.where(none & (size > 0), largest, quotient)
