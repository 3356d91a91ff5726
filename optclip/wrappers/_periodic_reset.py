"""An optimizer whose moments are reset every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optclip._arrays import _leaves, _validate
from optclip._arrays._numerics import counted
from optclip._arrays._types import KeyPath, Leaf, PyTree
from optclip.typing import Number, PeriodicResetState
from optclip.wrappers._inner import check_state, transformation

_COUNTS = ("count", "clip_step", "clip_record", "skip_record")


def with_periodic_reset(
    inner: optax.GradientTransformation,
    every: int = 500,
    *,
    warmup: int = 150,
    floor: Number = 0.01,
    keep: Callable[[str], bool] | str | None = "counts",
) -> optax.GradientTransformationExtraArgs:
    r"""Reset an optimizer's state before every `every`-th update, then warm up again.

    After a reset the updates are multiplied by a cosine from `floor` to 1,
    :math:`1 - (1 - floor) \cdot (1 + \cos(\pi k / (warmup + 1))) / 2` for the k-th
    update from it on, counted from 0.

    Args:
      inner: an optimizer, or a part of one.
      every: the number of updates from reset to reset, an int above 0.
      warmup: the number of updates after a reset over which the factor rises, an int of
        at least 0; 0 for none.
      floor: the factor of the first update after a reset, from 0 to 1.
      keep: which leaves of the state stay: a function of the path of a leaf; None for
        none; `"counts"` for the fields called `count`, so that schedules and the
        correction of Adam's bias go on, and for what clips recorded. Hyperparameters
        that optax.inject_hyperparams keeps go back to what they were at the start.

    Returns:
      A transformation. Its state goes back to what `inner.init` makes of the parameters
      (of the updates, if `update` is given none).

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.with_periodic_reset(optax.trace(decay=1.0), every=3, warmup=0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for _ in range(4):
      ...     updates, state = tx.update(jnp.ones(1), state)
      ...     print(updates)
      [1.]
      [2.]
      [1.]
      [2.]

    Source: Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
    Training*, 2025, arXiv:2501.06842.
    """
    wrapped = transformation("inner", inner)
    _validate.length("every", every)
    _validate.length("warmup", warmup, least=0)
    _validate.fraction("floor", floor)
    if keep not in ("counts", None):
        wanted = "a function of the path of a leaf of the state, 'counts' or None"
        _validate.kind("keep", keep, Callable, wanted)

    def init_fn(params: PyTree) -> PeriodicResetState:
        return PeriodicResetState(jnp.zeros((), jnp.int32), wrapped.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PeriodicResetState]:
        check_state(state, PeriodicResetState)
        number = state.reset_step + 1
        phase = number % every
        blank = wrapped.init(updates if params is None else params)
        before = _reset_if(phase == 0, state.reset_inner, blank, keep)
        inner_updates, inner_state = wrapped.update(
            updates, before, params, **extra_args
        )
        factor = jnp.where(number < every, 1.0, _warmup_factor(phase, warmup, floor))
        step = counted(state.reset_step)
        return _scaled(inner_updates, factor), PeriodicResetState(step, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _reset_if(
    is_due: jax.Array,
    state: PyTree,
    blank: PyTree,
    keep: Callable[[str], bool] | str | None,
) -> PyTree:
    """The blank state if a reset is due, but for the leaves that stay; else `state`."""

    def choose(path: KeyPath, old: ArrayLike, new: ArrayLike) -> ArrayLike:
        stays = callable(keep) and keep(_leaves.path_str(path))
        if stays or (keep == "counts" and _is_count(path)):
            return old
        return jnp.where(is_due, new, old)

    return jax.tree.map_with_path(choose, state, blank)


def _is_count(path: KeyPath) -> bool:
    """Whether it is a field that counts steps; a parameter called `count` is not."""
    fields = (key for key in path if isinstance(key, jax.tree_util.GetAttrKey))
    return any(key.name in _COUNTS for key in fields)


def _warmup_factor(phase: jax.Array, warmup: int, floor: Number) -> jax.Array:
    """What the `phase`-th updates after a reset are multiplied by."""
    angle = jnp.pi * phase.astype(jnp.float32) / (warmup + 1)
    cosine = 1 - (1 - floor) * (1 + jnp.cos(angle)) / 2
    return jnp.where(phase < warmup, cosine, 1.0)


def _scaled(updates: PyTree, factor: jax.Array) -> PyTree:
    """The floating leaves times a factor; bit-identical where it is 1."""

    def scaled(x: Leaf) -> Leaf:
        if not _leaves.is_floating(x):
            return x
        like = jnp.asarray(x)
        wide = _leaves.widen(like) * factor.astype(_leaves.real_dtype(like.dtype))
        return jnp.where(factor == 1, like, _leaves.narrow(wide, like))

    return jax.tree.map(scaled, updates)
