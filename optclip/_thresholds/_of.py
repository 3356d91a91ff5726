"""A rule for one statistic over the norms of each leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _collectives, _packed_state, _validate
from .._arrays._types import PyTree
from . import _learning
from ._rule import RuleOfRule, Seen, Threshold, takes_vector
from ._rule_results import checked_update
from ._threshold_argument import one_rule

Statistic = str | float
_NAMES = ("max", "mean", "median")


@dataclasses.dataclass(frozen=True)
class Of(RuleOfRule):
    """See `of`."""

    takes_vector: ClassVar[bool] = False
    learns_from_zeros: ClassVar[bool] = True
    couples_norms: ClassVar[bool] = True

    reduce: Statistic

    def init(self, norm: PyTree) -> PyTree:
        return self.rule.init(jax.tree.map(lambda x: jnp.zeros((), x.dtype), norm))

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        norm = self._of_leaves(seen.norm)
        is_vector = takes_vector(self.rule) and jax.tree.structure(norm).num_leaves > 1

        def packed(tree: PyTree) -> PyTree:
            """Return a tree of numbers as one vector, if the rule takes vectors."""
            if not is_vector:
                return tree
            return _packed_state.packed(tree, norm, is_like_params=False)

        def unpacked(tree: PyTree) -> PyTree:
            return _packed_state.unpacked(tree, norm) if is_vector else tree

        inner = seen._replace(
            norm=packed(norm),
            finite=packed(jax.tree.map(_all, seen.finite)),
            keep=lambda t: packed(self._of_leaves(seen.keep(unpacked(t)))),
            measure=lambda tree: packed(self._of_leaves(seen.measure(tree))),
        )
        old = packed(memory)
        threshold, new = checked_update("threshold", self.rule, inner, old)
        # The memory is chosen here too, since a leaf with one norm that is not finite
        # has no statistic, and its other norms would teach.
        teaching = _learning.teaches(self.rule, inner.norm, inner.finite)
        return unpacked(threshold), unpacked(_learning.learned(teaching, new, old))

    def _of_leaves(self, norms: PyTree) -> PyTree:
        return jax.tree.map(functools.partial(_statistic, self.reduce), norms)


def _all(flags: jax.Array) -> jax.Array:
    """Return whether all flags of a leaf are set, on all devices."""
    if not flags.ndim:
        return flags
    return _collectives.largest((~flags).astype(jnp.float32)) <= 0


def _statistic(reduce: Statistic, norm: jax.Array) -> jax.Array:
    """Return a statistic of norms of at least 0: a name, or the level of a quantile."""
    if not norm.ndim:
        return norm
    if not norm.size:
        return jnp.zeros((), norm.dtype)
    if reduce == "max":
        return jnp.maximum(_collectives.largest(norm), 0)
    if reduce == "mean":
        # Each norm is divided first, since the sum of many may overflow.
        return _total(norm / _count(norm))
    return _quantile(norm, 0.5 if reduce == "median" else float(reduce))


def _count(norm: jax.Array) -> int:
    """Return the number of norms on all devices."""
    return norm.size * _axis_names.axes_size(_axis_names.split_axes(norm))


def _total(x: jax.Array) -> jax.Array:
    return _collectives.reduced_over(lax.psum, jnp.sum(x, dtype=x.dtype))


def _quantile(norm: jax.Array, q: float) -> jax.Array:
    """Return the quantile, interpolated linearly, as in `numpy.quantile`."""
    place = q * (_count(norm) - 1)
    rank = math.floor(place)
    low = _of_rank(norm, rank)
    # The next larger norm, unless several equal the one of this rank.
    above = jnp.where(norm > low, norm, jnp.full_like(norm, jnp.inf))
    least = _collectives.reduced_over(lax.pmin, jnp.min(above))
    up_to_low = _total((norm <= low).astype(jnp.int32))
    high = jnp.where(up_to_low > rank + 1, low, least)
    # Infinite only if there is no next norm, where the fraction is 0.
    step = jnp.where(jnp.isfinite(high), high - low, jnp.zeros_like(low))
    return low + step * (place - rank)


def _of_rank(norm: jax.Array, rank: int) -> jax.Array:
    """Return the norm of a rank, from 0, by bisection over the bits of floats.

    Floats of at least 0 are ordered like their bit patterns. Each step counts the norms
    below a pattern, a sum that also crosses devices, where a sort would gather them.
    """
    bits = jnp.finfo(norm.dtype).bits
    whole = {32: jnp.int32, 64: jnp.int64}[bits]
    patterns = lax.bitcast_convert_type(norm, whole)

    def with_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        larger = found | (jnp.ones((), whole) << (bits - 2 - i).astype(whole))
        below = _total((patterns < larger).astype(jnp.int32))
        return jnp.where(below <= rank, larger, found)

    found = lax.fori_loop(0, bits - 1, with_bit, jnp.zeros((), whole))
    return lax.bitcast_convert_type(found, norm.dtype)


def of(reduce: Statistic, rule: Threshold) -> Of:
    """Apply a rule to one statistic over all norms of each leaf.

    Where a scope has several norms per leaf, such as singular values, slices or
    elements, other rules learn each of them separately. This one learns the statistic,
    and the threshold applies to all norms of the leaf.

    Example:
      Limit singular values to the running median of the largest one:

      >>> import jax.numpy as jnp, optclip
      >>> largest = optclip.thresholds.of("max", optclip.thresholds.quantile(0.5))
      >>> tx = optclip.clip_by_singular_value(largest)
      >>> state = tx.init(jnp.zeros((2, 2)))
      >>> for value in (2.0, 2.0, 8.0):
      ...     clipped, state = tx.update(jnp.diag(jnp.array([value, 1.0])), state)
      ...     print(clipped.diagonal().round(3))
      [2. 1.]
      [2. 1.]
      [2. 1.]

    Args:
      reduce: `"max"`, `"mean"`, `"median"`, or the level of a quantile from 0 to 1,
        interpolated linearly.
      rule: The rule, number or optax schedule; `current()` is the statistic itself.

    Returns:
      A rule whose memory is that of `rule` for one norm per leaf. A leaf split over
      devices has one statistic.

    Edge cases:
      - Stacked leaf: the statistic covers the norms of all its matrices.
      - Norm that is NaN or inf: counts as 0, and its leaf does not teach.
      - One norm per leaf, or for the tree: the same as `rule`.
    """
    if isinstance(reduce, str):
        _validate.choice("reduce", reduce, _NAMES)
    else:
        _validate.fraction("reduce", reduce)
    return Of(one_rule("rule", rule), reduce)
