"""Rules of single norms: of the parameters, the previous step, and this step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_array, as_like, ratio, select
from .._arrays._types import Number, PyTree
from ._rule import OfVector, Seen, WithoutMemory


@dataclasses.dataclass(frozen=True)
class RelativeToParams(OfVector, WithoutMemory):
    """See `relative_to_params`."""

    is_stateless: ClassVar[bool] = True

    ratio: Number
    min_norm: Number

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        _validate.params_given(
            seen.params, "since thresholds.relative_to_params is relative to them"
        )

        # Compiled functions reject numbers that `as_array` accepts, such as 2**40.
        ratio, least = as_array(self.ratio), as_array(self.min_norm)

        def fraction(norm: jax.Array) -> jax.Array:
            return _fraction(norm, ratio, least)

        return _batching.each(fraction, seen.measure(seen.params)), memory


# Compiled, so that slices of one type are traced once.
@jax.jit
def _fraction(norm: jax.Array, ratio: jax.Array, least: jax.Array) -> jax.Array:
    return ratio.astype(norm.dtype) * jnp.maximum(norm, least.astype(norm.dtype))


def relative_to_params(
    ratio: Number = 0.01, min_norm: Number = 1e-3
) -> RelativeToParams:
    """Clip to a fraction of the parameters' norm.

    The threshold is `ratio * max(norm(params), min_norm)`, over the same scope.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.relative_to_params(0.1)
      >>> tx = optclip.clip_by(rule, over=optclip.axes(0))
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 0.0]])
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1e-5]])
      >>> print(tx.update(grads, tx.init(kernel), kernel)[0])
      [[3.e-01 0.e+00]
       [4.e-01 1.e-05]]

    Args:
      ratio: Maximum norm of the updates as a fraction of the parameters' norm.
      min_norm: Lower bound on the parameters' norm, so that zero parameters can train.

    Returns:
      A rule without memory; `update` requires `params`. NaN parameters make the updates
      NaN; parameters of infinite norm clip nothing.

    See Also:
      `recipes.agc`.

    References:
      Brock et al., 2021, arXiv:2102.06171, equation 3.
    """
    return RelativeToParams(
        _validate.plain("ratio", ratio), _validate.plain("min_norm", min_norm)
    )


class FirstNorm(NamedTuple):
    """Hold the norm of the parameters at the first step, or -1 before it.

    Its type differs from the memory of a rule of gradients, which has the same shape.
    """

    norm: PyTree


@dataclasses.dataclass(frozen=True)
class InitialNorm(OfVector):
    """See `initial_norm`."""

    ratio: Number

    def init(self, norm: PyTree) -> FirstNorm:
        return FirstNorm(jax.tree.map(lambda x: jnp.full_like(x, -1.0), norm))

    def update(self, seen: Seen, memory: FirstNorm) -> tuple[PyTree, FirstNorm]:
        _validate.params_given(
            seen.params, "since thresholds.initial_norm is relative to them"
        )
        measured = seen.measure(seen.params)
        initial = _batching.each(
            lambda old, norm: select((old < 0) & jnp.isfinite(norm), norm, old),
            memory.norm,
            measured,
        )

        def threshold(norm: jax.Array) -> jax.Array:
            limit = as_like(self.ratio, norm) * norm
            return select(norm > 0, limit, jnp.full_like(norm, jnp.inf))

        return _batching.each(threshold, initial), FirstNorm(initial)


def initial_norm(ratio: Number = 1.0) -> InitialNorm:
    """Clip to the parameters' norm at the first step, over the same scope.

    In `optclip.constrain` with `response="normalize"`, each parameter keeps this norm,
    as in the Hyperball optimizer. `relative_to_params(1.0)` reads the last step's norm
    instead, and drifts by its rounding errors.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> keep_norm = optclip.clip_by(
      ...     optclip.thresholds.initial_norm(),
      ...     over="leaf", response="normalize", name="weights",
      ... )
      >>> tx = optclip.constrain(optax.sgd(1.0), keep_norm)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([-3.0, 4.0]), tx.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      [5. 0.]

    Args:
      ratio: Threshold as a multiple of the first norm.

    Returns:
      A rule whose memory is the first finite norm; `update` requires `params`. Where it
      is 0, as of a bias or of LoRA's second factor, the threshold is inf.

    See Also:
      `constrain`, `thresholds.relative_to_params`.

    References:
      Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them 2.1:
      Hyperball Optimization*, 2025.
    """
    return InitialNorm(_validate.plain("ratio", ratio))


@dataclasses.dataclass(frozen=True)
class PreviousNorm(OfVector):
    """See `previous_norm`."""

    max_norm: Number

    def init(self, norm: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        def threshold(norm: jax.Array, previous: jax.Array) -> jax.Array:
            # In the first step, and after a zero gradient, the memory is 0. The current
            # norm then replaces it.
            before = select(previous > 0, previous, norm)
            limit = as_like(self.max_norm, norm)
            exceeds = before > limit
            safe = select(exceeds, before, jnp.ones_like(before))
            return select(exceeds, norm * ratio(limit, safe), norm)

        return _batching.each(threshold, seen.norm, memory), seen.norm


def previous_norm(max_norm: Number = 1.0) -> PreviousNorm:
    """Scale by the previous step's norm, as optimizers fused into the backward pass do.

    The update is `u * min(1, max_norm / previous)`, so the threshold is
    `norm * min(1, max_norm / previous)`. The first large norm after small ones is not
    clipped.

    An optimizer that updates each layer during the backward pass does not have the
    global norm yet. This rule shows the effect in an ordinary run. Inside such an
    optimizer, call
    `optclip.functional.clip_by_global_norm(gradient, max_norm, use_norm=previous)` per
    layer.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(optclip.thresholds.previous_norm(1.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (4.0, 2.0, 0.5, 8.0, 8.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [1.]
      [0.5]
      [0.25]
      [8.]
      [1.]

    Args:
      max_norm: Maximum norm of the updates while norms do not grow.

    Returns:
      A rule whose memory is the last finite norm. In the first step, and after a norm
      of 0, the threshold is `max_norm`.
    """
    return PreviousNorm(_validate.plain("max_norm", max_norm))


@dataclasses.dataclass(frozen=True)
class Current(OfVector, WithoutMemory):
    """See `current`."""

    is_stateless: ClassVar[bool] = True

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        return seen.norm, memory


def current() -> Current:
    """Clip to this step's own norm, or to a statistic of this step's norms.

    Alone it clips nothing. Scaled, or as the rule of `of`, the threshold follows each
    step, without a memory.

    Example:
      Clip each leaf's elements to the 0.75-quantile of their absolute values:

      >>> import jax.numpy as jnp, optclip
      >>> from optclip import thresholds
      >>> tx = optclip.clip_by_value(thresholds.of(0.75, thresholds.current()))
      >>> updates = jnp.array([-9.0, 1.0, 2.0, -3.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-4.  1.  2. -3.  4.]

    Returns:
      A rule without memory.

    See Also:
      `of`, `scaled`.
    """
    return Current()
