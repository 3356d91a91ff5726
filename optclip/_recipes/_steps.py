"""Methods that limit the step itself, by second moments or by parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from .._arrays import _batching, _leaves, _prefix, _validate
from .._arrays._numerics import as_array, promotable, ratio
from .._arrays._types import KeyPath, LeafLike, PyTree
from .._thresholds import Seen
from .._transforms import clip_by
from .._typing import ClipOptions, MomentClipOptions, Number
from .._wrappers import clip_after
from ._recipe_options import (
    build,
    masked,
    reject_zero_after_moments,
)


@dataclasses.dataclass(frozen=True)
class _UnitQuotient:
    """Divide updates by the norm of `quotients` where it exceeds 1."""

    quotients: Callable[[Seen], PyTree]

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        excess = seen.measure(self.quotients(seen))
        return _batching.each(_allowed, seen.norm, seen.finite, excess), memory


def _allowed(norm: jax.Array, finite: jax.Array, excess: jax.Array) -> jax.Array:
    one, inf = jnp.ones_like(norm), jnp.full_like(norm, jnp.inf)
    # Quotients of 0 set no limit. Their divisor is 1, which avoids 0 / 0.
    none = excess == 0
    allowed = jnp.where(none, inf, ratio(norm, jnp.where(none, one, excess)))
    # Norms below 2**-60 read 0. Their threshold is inf unless the quotients exceed 1,
    # since a threshold of 0 would zero an update that is allowed.
    off = ~finite | ((norm == 0) & (excess <= 1))
    return jnp.where(off, inf, allowed)


def stable_adamw(
    b1: Number = 0.9,
    b2: Number = 0.99,
    eps: Number = 1e-6,
    weight_decay: float | jax.Array = 0.0,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Scale AdamW down in leaves whose second moment is outdated (StableAdamW).

    Per leaf, `u = u / max(1, rms)` with `rms = sqrt(mean(g**2 / max(v, eps**2)))`,
    where `v` is Adam's debiased second moment.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_adamw()
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size]), state, jnp.zeros(1))
      >>> print(f"{optclip.metrics(state)['clip/coefficient']:.2f} {updates[0]:.2f}")
      0.58 0.37

    Args:
      b1: Decay of Adam's first moment.
      b2: Decay of Adam's second moment.
      eps: Adam's `eps`, also used in `rms`.
      weight_decay: AdamW's weight decay; if not 0, `update` requires `params`.
      options: Options of `clip_by`, listed in `typing.MomentClipOptions`.

    Returns:
      A transformation that replaces `optax.scale_by_adam` and `add_decayed_weights`;
      add a learning rate after it. It records the RMS of each update and its limit.

    Raises:
      ValueError: `nonfinite="zero"` is passed, which would hide NaN moments.

    References:
      Wortsman et al., *Stable and low-precision training for large-scale
      vision-language models*, 2023, arXiv:2304.13013, algorithm 2.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("eps", eps)
    _validate.plain("weight_decay", weight_decay)
    reject_zero_after_moments("stable_adamw", options)
    b1, b2, eps, weight_decay = map(promotable, (b1, b2, eps, weight_decay))

    def over_second_moment(seen: Seen) -> PyTree:
        count, nu = (
            optax.tree.get(seen.extra["inner_state"], name) for name in ("count", "nu")
        )
        log = jnp.log(jnp.asarray(b2, jnp.float32))
        correction = -jnp.expm1(count.astype(jnp.float32) * log)

        def quotient(g: LeafLike, v: LeafLike) -> LeafLike:
            if not _leaves.is_floating(g):
                return g
            wide = _leaves.widen(jnp.asarray(g))
            root = jnp.sqrt(v.astype(jnp.abs(wide).dtype) / correction)
            # v may be 0. The bound keeps the norm finite and its inverse normal.
            return jnp.minimum(_quotient(wide, jnp.maximum(root, eps)), 2.0**60)

        return jax.tree.map(quotient, seen.extra["gradients"], nu)

    inner = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    rule = _UnitQuotient(over_second_moment)
    clip = build(clip_by, options, rule, over="leaf", norm="rms")
    if _validate.concrete(weight_decay) != 0:
        inner = optax.chain(inner, optax.add_decayed_weights(weight_decay))
    return clip_after(masked(inner, _leaves.are_floating), clip)


def clippy(
    relative: Number = 0.5, absolute: Number = 0.01, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Scale steps so that no weight changes by more than a fraction of itself (Clippy).

    Each leaf's step is multiplied by the minimum over its elements of
    `min(1, (relative * |w| + absolute) / |step|)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optax.sgd(1.0), optclip.recipes.clippy(absolute=0.0))
      >>> params = jnp.array([1.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([2.0, 2.0]), tx.init(params), params)
      >>> print(updates)
      [-0.5 -0.5]

    Args:
      relative: Maximum change as a fraction of the weight; 0.1 in TensorFlow
        Recommenders.
      absolute: Maximum change of a weight of 0; 1e-7 in TensorFlow Recommenders.
      options: Options of `clip_by`, listed in `typing.ClipOptions`.

    Returns:
      A transformation; place it last, after the learning rate. `update` requires
      `params`. It records the largest element of each step and its limit.

    References:
      Tang et al., *Improving Training Stability for Multitask Ranking Models in
      Recommender Systems*, 2023, arXiv:2302.09178; defaults from ports of its code.
    """
    _validate.plain("relative", relative)
    _validate.plain("absolute", absolute)

    def over_allowed(seen: Seen) -> PyTree:
        _validate.params_given(seen.params, "recipes.clippy")

        def quotient(path: KeyPath, u: LeafLike, w: LeafLike | None) -> LeafLike:
            if not _leaves.is_floating(u):
                return u
            if w is None:
                raise ValueError(_prefix.lacks_leaf("params", path, seen.params))
            size = jnp.abs(_leaves.widen(jnp.asarray(w)))
            least = as_array(absolute).astype(size.dtype)
            allowed = as_array(relative).astype(size.dtype) * size + least
            return _quotient(_leaves.widen(jnp.asarray(u)), allowed)

        reason = "which clippy compares element by element"
        _leaves.flatten_dense(seen.updates, reason)
        # Updates may be None where parameters are arrays.
        params = _prefix.lookup(seen.params, seen.updates)
        _leaves.flatten_dense(params, reason)
        return jax.tree.map_with_path(quotient, seen.updates, params)

    rule = _UnitQuotient(over_allowed)
    return build(clip_by, options, rule, over="leaf", norm="inf")


def _quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return `|x| / divisor`, or a very large number if only the divisor is 0."""
    size = jnp.abs(x)
    none = divisor == 0
    # A divisor of 0 is replaced by 1 to keep NaN out of the quotient and its
    # derivative.
    quotient = ratio(size, jnp.where(none, jnp.ones_like(divisor), divisor))
    largest = jnp.asarray(jnp.finfo(size.dtype).max / 2, size.dtype)
    return jnp.where(none & (size > 0), largest, quotient)
