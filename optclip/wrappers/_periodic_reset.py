"""An optimizer whose moments begin anew every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optclip._arrays import _leaves, _validate
from optclip._arrays._numerics import counted
from optclip._arrays._types import KeyPath, PyTree
from optclip.typing import Number
from optclip.wrappers._inner import transformation

_KEPT = ("count", "clip_step", "clip_record", "skip_record")


class PeriodicResetState(NamedTuple):
    """The state of `with_periodic_reset`.

    Attributes:
      reset_step: int32, the number of updates so far.
      reset_inner: the state of the optimizer.
    """

    reset_step: jax.Array
    reset_inner: Any


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
      warmup: over how many updates they come back, an int of at least 0; 0 for none.
      floor: the factor of the first, from 0 to 1.
      keep: tells by its path which leaves of the state stay; None for none;
        `"counts"` for the fields called `count`, so that schedules and the correction
        of Adam's bias go on, and for what clips recorded. Hyperparameters that
        optax.inject_hyperparams keeps go back to what they were at the start.

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
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[Any, PeriodicResetState]:
        number = state.reset_step + 1
        phase = number % every
        blank = wrapped.init(updates if params is None else params)
        begun = _begun(state.reset_inner, blank, phase == 0, keep)
        found, inner_state = wrapped.update(updates, begun, params, **extra_args)
        factor = jnp.where(number < every, 1.0, _back(phase, warmup, floor))
        step = counted(state.reset_step)
        return _times(found, factor), PeriodicResetState(step, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _begun(state: Any, blank: Any, now: jax.Array, keep: Any) -> Any:
    """The state, or where it is `now` a blank one but for what is kept."""

    def choose(path: KeyPath, old: Any, new: Any) -> Any:
        kept = callable(keep) and keep(_leaves.path_str(path))
        if kept or (keep == "counts" and _is_count(path)):
            return old
        return jnp.where(now, new, old)

    return jax.tree.map_with_path(choose, state, blank)


def _is_count(path: KeyPath) -> bool:
    """Whether it is a field of that name: a parameter called `count` is none."""
    fields = (key for key in path if isinstance(key, jax.tree_util.GetAttrKey))
    return any(key.name in _KEPT for key in fields)


def _back(phase: jax.Array, warmup: int, floor: Any) -> jax.Array:
    """What the updates are multiplied by, so many of them after a reset."""
    angle = jnp.pi * phase.astype(jnp.float32) / (warmup + 1)
    cosine = 1 - (1 - floor) * (1 + jnp.cos(angle)) / 2
    return jnp.where(phase < warmup, cosine, 1.0)


def _times(updates: PyTree, factor: jax.Array) -> Any:
    """The floating leaves times a factor; to the bit as they were where it is 1."""

    def scaled(x: Any) -> Any:
        if not _leaves.is_floating(x):
            return x
        like = jnp.asarray(x)
        wide = _leaves.widen(like) * factor.astype(_leaves.real_dtype(like.dtype))
        return jnp.where(factor == 1, like, _leaves.narrow(wide, like))

    return jax.tree.map(scaled, updates)
