"""The norms that a rule learns from, and its memory after a step.

Each norm counts by itself: a norm that is NaN, inf or, for most rules, 0 keeps its own
memory, and does not affect the memory of the other norms.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._arrays import (
    _batching,
    _collectives,
    _leaves,
    _numerics,
    _packed_state,
    _placement,
    _xla,
)
from .._arrays._types import PyTree
from ._rule import learns_from_zeros

# The largest number of flags to materialize. More occur only if the norms are single
# elements or very many slices, and a copy of the flags would then be expensive.
_FEW = 2**16


def teaches(rule: object, norm: PyTree, finite: PyTree) -> PyTree:
    """Return for each norm whether a rule learns from it.

    A zero gradient has no size to learn: it comes from an idle expert, a frozen layer
    or a masked loss.
    """
    if learns_from_zeros(rule):
        return finite
    return _batching.each(lambda n, is_finite: is_finite & (n != 0), norm, finite)


def learned(teaching: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Return the memory after a step: the new one of each norm that teaches its rule.

    A part of the memory with the structure of the norms has an entry per norm. The
    other parts are shared by all norms, and are new if one of these teaches.

    Args:
      teaching: Bools like the norms.
      new: Memory that the rule returned.
      old: Memory before the step, with the structure and shapes of `new`.
    """
    flags, treedef = jax.tree.flatten(teaching)
    if not flags or not jax.tree.leaves(new):
        return new
    # The flags are materialized: otherwise XLA on CPU recomputes the norms for each
    # entry of the memory.
    flags = [_xla.materialized(x) if _leaves.size_of(x) <= _FEW else x for x in flags]
    of_norms = treedef.unflatten(flags)
    is_per_norm = functools.partial(_packed_state.is_per_norm, treedef)
    # Called only if a part is shared, since eager code would compute an unused flag.
    any_teaches = functools.cache(lambda: _any(flags))

    def of_part(part: PyTree) -> PyTree:
        """Return one flag for each array of a part of the memory."""
        if not is_per_norm(part):
            return any_teaches()
        return jax.tree.map(
            lambda flag, entry: jax.tree.map(lambda _: flag, entry), of_norms, part
        )

    of_arrays = jax.tree.map(of_part, old, is_leaf=is_per_norm)
    return _batching.each(_new_or_old, new, old, of_arrays, as_slices=False)


def _new_or_old(new: ArrayLike, old: ArrayLike, flag: jax.Array) -> jax.Array:
    """Return the entries of `new` whose norm teaches; dtype and placement of `old`."""
    new = jnp.asarray(new)
    old = jnp.asarray(_numerics.as_counted_in(old, new))
    if new.dtype != old.dtype:
        new = new.astype(old.dtype)
    if new.ndim and jax.typeof(old).sharding.mesh == jax.typeof(new).sharding.mesh:
        new = _placement.placed_as(new, old)
    if flag.shape != old.shape[: flag.ndim]:
        # The array is one entry for all norms of a leaf, such as of its elements.
        flag = _any([flag])
    # Further axes, such as a window, belong to one norm.
    flag = jnp.expand_dims(flag, tuple(range(flag.ndim, old.ndim)))
    return _numerics.select(jnp.broadcast_to(flag, old.shape), new, old)


def _any(flags: list[jax.Array]) -> jax.Array:
    """Return whether one of the flags is set, on any device."""
    is_set = _batching.Batched(flags).any().astype(jnp.float32)
    # All devices use the same flag, so that their memories stay equal.
    largest = _collectives.reduced_over(lax.pmax, is_set)
    return _xla.materialized(largest) > 0
