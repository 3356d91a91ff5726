"""An optimizer whose state is reset at regular intervals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._arrays import _leaves, _placement, _validate
from .._arrays._numerics import as_count, counted
from .._arrays._types import KeyPath, LeafLike, PyTree
from .._typing import PeriodicResetState
from ._checks import check_state, transformation

# The factor of the first update after a reset, as in SPAM.
_FLOOR = 0.01
_COUNTS = (
    "count",
    "clip_step",
    "clip_record",
    "skip_record",
    "skip_finite",
    "history_rows",
    "history_count",
    "history_names",
)


def with_periodic_reset(
    inner: optax.GradientTransformation,
    every: int = 500,
    *,
    warmup: int = 150,
    keep_counts: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Reset an optimizer's state before every `every`-th update, then warm up again.

    Update k after a reset (k = 0, 1, ...) is multiplied by a factor that rises from
    0.01 to 1: `1 - 0.99 * (1 + cos(pi * k / (warmup + 1))) / 2`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.with_periodic_reset(optax.trace(decay=1.0), every=3, warmup=0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for _ in range(7):
      ...     updates, state = tx.update(jnp.ones(1), state)
      ...     print(updates)
      [1.]
      [2.]
      [1.]
      [2.]
      [3.]
      [1.]
      [2.]

    Args:
      inner: The optimizer to wrap, or a part of one.
      every: Number of updates per period, a positive int; the first has `every - 1`.
      warmup: Number of scaled updates after each reset; 0 for none.
      keep_counts: Whether to preserve clipping records and fields named `count`, so
        that schedules and Adam's bias correction continue. Values of
        `optax.inject_hyperparams` are always reset. Default: True.

    Returns:
      A transformation. A reset restores `inner.init(params)`, or `inner.init(updates)`
      if `update` receives no parameters.

    References:
      Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
      Training*, 2025, arXiv:2501.06842.
    """
    wrapped = transformation("inner", inner)
    every = _validate.length("every", every)
    warmup = _validate.length("warmup", warmup, least=0)
    _validate.flag("keep_counts", keep_counts)

    def init_fn(params: PyTree) -> PeriodicResetState:
        return PeriodicResetState(jnp.zeros((), jnp.int32), wrapped.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PeriodicResetState]:
        check_state(state, PeriodicResetState)
        number = as_count(state.reset_step) + 1
        phase = number % every
        blank = wrapped.init(updates if params is None else params)
        is_due = phase == 0

        def before_step(path: KeyPath, old: ArrayLike, new: ArrayLike) -> ArrayLike:
            # A parameter named `count` is no field.
            fields = (key for key in path if isinstance(key, jax.tree_util.GetAttrKey))
            if keep_counts and any(key.name in _COUNTS for key in fields):
                return old
            return _placement.computed(
                lambda old, new: jnp.where(is_due, new, old), old, new
            )

        before = jax.tree.map_with_path(before_step, state.reset_inner, blank)
        inner_updates, inner_state = wrapped.update(
            updates, before, params, **extra_args
        )
        angle = jnp.pi * phase.astype(jnp.float32) / (warmup + 1)
        rising = 1 - (1 - _FLOOR) * (1 + jnp.cos(angle)) / 2
        is_warm = (number < every) | (phase >= warmup)
        factor = jnp.where(is_warm, 1.0, rising)
        step = counted(state.reset_step)
        return _scaled(inner_updates, factor), PeriodicResetState(step, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _scaled(updates: PyTree, factor: jax.Array) -> PyTree:
    """Multiply the floating leaves by a factor; unchanged where it is 1."""

    def scaled(x: LeafLike) -> LeafLike:
        if not _leaves.is_floating(x):
            return x
        like = jnp.asarray(x)
        wide = _leaves.widen(like) * factor.astype(_leaves.real_dtype(like.dtype))
        # The select keeps updates bit-identical where the factor is 1.
        return jnp.where(factor == 1, like, _leaves.narrow(wide, like))

    return _placement.computed(lambda x: jax.tree.map(scaled, x), updates)
