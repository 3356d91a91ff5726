"""Fit a threshold to the loss, for `skip(max_loss=...)`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _axis_names, _numerics, _validate
from .._arrays._batching import Batched
from .._arrays._types import PyTree
from .._thresholds import (
    Rule,
    Seen,
    init_memory,
    learned_thresholds,
)

# The tree structure of a loss, which is a scalar.
_ONE_LOSS = jax.tree.structure(0)

_WANTED = "the loss, a real scalar, because max_loss is set"
_ADVICE = (
    "Pass value= or loss=: tx.update(updates, state, params, value=loss). Flax's"
    " TrainState.apply_gradients does not forward it. Without a loss, omit max_loss;"
    " for olmo_skip pass use_loss=False."
)


def init_loss_memory(rule: Rule) -> PyTree:
    """Return the memory of a rule before it receives the first loss."""
    zero = jnp.zeros((), jnp.float32)
    return init_memory("max_loss", rule, _ONE_LOSS, [zero], jnp.zeros_like)


def loss_in(extra: dict[str, Any]) -> jax.Array:
    """Return the loss that was passed to `update`.

    Raises:
      ValueError: There is none.
    """
    loss = passed_loss(extra, _WANTED)
    if loss is None:
        raise ValueError(_validate.must_be("value", _WANTED, None, _ADVICE))
    return loss


def passed_loss(
    extra: dict[str, Any], wanted: str = "the loss, a real scalar"
) -> jax.Array | None:
    """Return the extra argument `value`, or `loss`, the name that some trainers use."""
    name = "loss" if extra.get("value") is None else "value"
    value = extra.get(name)
    if value is None:
        return None
    if not _validate.is_number(value) or jnp.shape(value):
        raise ValueError(_validate.must_be(name, wanted, value, _ADVICE))
    loss = _numerics.as_array(value).astype(jnp.float32)
    _axis_names.check_one(name, loss)
    return loss


def loss_threshold(
    rule: Rule,
    memory: PyTree,
    loss: jax.Array,
    step: jax.Array,
    updates: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[jax.Array, PyTree]:
    """Return the threshold of the loss and the new memory of its rule."""
    seen = Seen(
        norm=None,
        finite=None,
        keep=lambda norm, threshold: jnp.minimum(norm, threshold),
        measure=functools.partial(_raise_on_measure, rule),
        params=params,
        step=step,
        extra=extra,
        updates=updates,
    )
    thresholds, memory = learned_thresholds(
        "max_loss", rule, _ONE_LOSS, Batched.unstacked([loss]), memory, seen,
        zeros_teach=True,
    )  # fmt: skip
    # A single loss is never stacked, so its threshold comes in a list.
    (threshold,) = (
        thresholds.entries() if isinstance(thresholds, Batched) else thresholds
    )
    limit = jnp.asarray(threshold).astype(jnp.float32)
    if limit.ndim:
        advice = "Reduce it to a scalar: the loss is one number."
        wanted = "one number per step"
        raise ValueError(_validate.must_be("max_loss", wanted, limit, advice))
    return limit, memory


def _raise_on_measure(rule: Rule, tree: PyTree, **how: Any) -> PyTree:
    del tree, how
    wanted = "a rule that reads only norms, since a loss has no tree to measure"
    advice = "Try optclip.thresholds.mean_plus_std(6.0)."
    raise ValueError(_validate.must_be("max_loss", wanted, rule, advice))
