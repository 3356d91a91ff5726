"""The action of moving single elements to a bound, exactly.

A response may define `element(x, lower, upper)` for a single number. Hard clipping
does, and an element then meets its bound exactly, where a coefficient would round.
Complex numbers are clipped by their modulus.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import (
    _axis_names,
    _leaves,
    _maxima,
    _numerics,
    _sparse,
    _validate,
)
from optclip._arrays._batching import Batched
from optclip._arrays._types import Leaf, Number
from optclip._clip import _limit, _scale
from optclip._clip._action import Action, check_replicated
from optclip._clip._clip import Clip, Decision
from optclip._clip._layout import LaidOutLeaf
from optclip.responses import Hard, Response


class Limits(NamedTuple):
    """Two thresholds for the elements of a leaf, each broadcasting to its shape."""

    lower: Number
    upper: Number


class Move(Action):
    """Move each element to its bound, by a response that defines `element`.

    There is one threshold, or two, and one coefficient per leaf, each of which
    broadcasts to it. Norms are read only for their shape and dtype.
    """

    def fit(
        self, clip: Clip, values: dict[str, list[Number]], norms: Batched
    ) -> Batched:
        """Return one threshold per leaf, at least 0, or its two bounds as `Limits`.

        Raises:
          ValueError: a threshold does not broadcast to the shape of its leaf.
        """
        if len(values) == 2:
            pairs = zip(values["lower"], values["upper"], strict=True)
            return Batched.apart([Limits(*pair) for pair in pairs])
        ((name, of_leaves),) = values.items()
        pairs = zip(of_leaves, norms.entries(), strict=True)
        return Batched.apart([_fitted(clip, name, *pair) for pair in pairs])

    def per_norm(self, thresholds: Batched, norms: Batched) -> Batched:
        """Return one threshold for each norm."""
        pairs = zip(thresholds.entries(), norms.entries(), strict=True)
        return norms.with_entries([_numerics.broadcast_like(*pair) for pair in pairs])

    def apply(self, decision: Decision) -> tuple[dict[int, Leaf], Batched]:
        """Return the clipped leaves by index, and how much each element shrank."""
        layout, limits = decision.layout, decision.thresholds.entries()
        moved = {}
        coefficients = [jnp.ones(()) for _ in layout.blocks]
        for i, leaf, block in layout.scaled():
            moved[i], coefficients[block] = _moved_leaf(
                decision.clip, leaf, limits[block]
            )
        return moved, Batched.apart(coefficients)

    def recorded(
        self, decision: Decision, coefficients: Batched
    ) -> tuple[Batched, Batched]:
        """Return the least threshold of each leaf, since each may have any shape."""
        norms = decision.norms
        limits = decision.thresholds.entries()
        least = [_maxima.smallest(_nearer(limit)) for limit in limits]
        shapes = [norm.shape for norm in norms.entries()]
        full = map(jnp.broadcast_to, coefficients.entries(), shapes)
        return norms.with_entries(least), norms.with_entries(list(full))


MOVE: Move = Move()


def _fitted(clip: Clip, name: str, value: Number, norm: jax.Array) -> jax.Array:
    _validate.broadcasts(name, jnp.shape(value), norm.shape)
    dtype = _leaves.real_dtype(norm.dtype)
    limit = _limit.as_limit(value, dtype, towards_zero=clip.strict)
    check_replicated(clip, name, limit, norm)
    return jnp.asarray(_limit.zero_below(0.0, limit))


def _moved_leaf(
    clip: Clip, leaf: LaidOutLeaf, limit: jax.Array | Limits
) -> tuple[Leaf, jax.Array]:
    """Return a leaf with its elements moved, and how much each shrank."""
    x = jnp.asarray(leaf.array)
    lower, upper = limit if isinstance(limit, Limits) else (-limit, limit)
    name = _leaves.named(leaf.path)
    for which, bound in (("lower", lower), ("upper", upper)):
        _axis_names.check_replicated(which, bound, x)
        if leaf.matrix is not None and jnp.ndim(bound):
            raise ValueError(
                f"`{which}` must be one number for {name}, a BCOO matrix, got"
                f" an array of shape {jnp.shape(bound)}. Give a number, or a rule"
                " that gives one, or make the leaf dense by todense()."
            )
    cleaned = clip.nonfinite == "zero"
    out, shrunk = bounded(
        name, x, lower, upper, clip.response, leaf.like,
        strict=clip.strict, cleaned=cleaned,
    )  # fmt: skip
    if leaf.matrix is None:
        return out, shrunk
    kept = jnp.all(shrunk == 1)
    if cleaned:
        off = jnp.isinf(lower) & jnp.isinf(upper)
        kept &= off | jnp.all(jnp.isfinite(x))
    return _sparse.wrapped(kept, leaf.value, leaf.matrix, out), shrunk


def bounded(
    name: str,
    x: jax.Array,
    lower: Number,
    upper: Number,
    response: Response,
    like: jax.Array,
    *,
    strict: bool,
    cleaned: bool,
) -> tuple[jax.Array, jax.Array]:
    """An array with its elements moved to the bounds.

    Args:
      name: what to call the array in an error.
      x: the array.
      lower: broadcasts to the shape of the array, in any real dtype.
      upper: likewise.
      response: has `element`.
      like: an array of the dtype to return.
      strict: whether bounds are rounded towards zero rather than to nearest.
      cleaned: whether non-finite elements become zero, unless both bounds are infinite.

    Returns:
      The array, and by what factor each element shrank (1 if untouched).
    """
    size = jnp.abs(_leaves.widen(x))
    lower, upper = (
        _limit.as_limit(bound, size.dtype, towards_zero=strict)
        for bound in (lower, upper)
    )
    lower, upper = _at(name, "lower", lower, size), _at(name, "upper", upper, size)
    off = jnp.isinf(lower) & jnp.isinf(upper)
    wanted = ~off & ~jnp.isfinite(x)
    cleared = jnp.where(wanted, jnp.zeros_like(x), x) if cleaned else x
    return _moved(cleared, lower, upper, response, like, strict)


def _nearer(limit: jax.Array | Limits) -> jax.Array:
    """The threshold, or the smaller modulus of two bounds, to be recorded."""
    if not isinstance(limit, Limits):
        return limit
    lower, upper = (jnp.abs(jnp.asarray(x, jnp.float32)) for x in limit)
    return jnp.minimum(_maxima.smallest(lower), _maxima.smallest(upper))


def _moved(x, lower, upper, response, like, strict):
    wide = _leaves.widen(x)
    size = jnp.abs(wide)
    if jnp.iscomplexobj(wide):
        goal = response.element(size, jnp.maximum(lower, 0), jnp.maximum(upper, 0))
        moved = goal != size
        wide = _pointing(wide)
        # The modulus is known to so much only.
        goal = goal * (1 - 8 * jnp.finfo(goal.dtype).eps) if strict else goal
        # Halves: the modulus of a finite number may be above the largest float.
        half = jnp.abs(wide * 0.5)
        safe = jnp.where(half > 0, half, jnp.ones_like(half))
        goal = _numerics.over(wide * 0.5, safe) * goal.astype(wide.dtype)
        near_side = upper
    else:
        goal = response.element(wide, lower, upper)
        moved = goal != wide
        if like.dtype != wide.dtype:
            # A bound that the dtype has no number for is its largest one.
            largest = jnp.asarray(jnp.finfo(like.dtype).max).astype(wide.dtype)
            goal = jnp.where(jnp.isnan(goal), goal, jnp.clip(goal, -largest, largest))
        near_side = jnp.where(jnp.signbit(wide), -lower, upper)
    moved &= ~jnp.isnan(size)
    kept = x if x.dtype == like.dtype else _scale.cast(x, like, towards_zero=strict)
    selects = isinstance(response, Hard) and not jnp.iscomplexobj(x) and not strict
    if selects and goal.dtype == x.dtype:
        # It selects, so that what is not moved is kept already: half the time.
        out = _scale.cast(goal, like)
    elif selects and x.dtype == like.dtype:
        out = _between(x, wide, lower, upper)
    else:
        out = jnp.where(moved, _scale.cast(goal, like, towards_zero=strict), kept)
    if strict:
        tiny = jnp.asarray(jnp.finfo(size.dtype).tiny, size.dtype)
        out = _scale.without_subnormals(out, near_side < tiny)
    shrunk = jnp.abs(goal) / jnp.where(size > 0, size, jnp.ones_like(size))
    return out, jnp.where(moved & (size > 0), shrunk, jnp.ones_like(size))


def _between(x, wide, lower, upper):
    """`x`, or the bound that it is past, rounded once: a third of the time."""
    upper = jnp.where(upper < lower, lower, upper)
    low, high = (_in_range(bound, x) for bound in (lower, upper))
    out = jnp.where(wide < lower, low, x)
    out = jnp.where(wide > upper, high, out)
    # Unless a bound is NaN, which must be seen.
    return jnp.where(lower <= upper, out, jnp.maximum(low, high))


def _in_range(bound, x):
    """A bound in the dtype of `x`; one too large for it is its largest number."""
    largest = jnp.asarray(jnp.finfo(x.dtype).max).astype(bound.dtype)
    return _leaves.narrow(jnp.clip(bound, -largest, largest), x)


def _pointing(wide):
    """Complex numbers with the direction of what is infinite, in place of infinity."""
    parts = jnp.real(wide), jnp.imag(wide)
    infinite = jnp.isinf(parts[0]) | jnp.isinf(parts[1])
    signs = (jnp.where(jnp.isinf(p), jnp.sign(p), jnp.zeros_like(p)) for p in parts)
    return jnp.where(infinite, jax.lax.complex(*signs), wide)


def _at(name, which, bound, x):
    if bound.ndim == 0:
        # Made from the leaf, which may be split over devices.
        return jnp.zeros_like(x) + bound
    advice = "Give a number, an array that does, or a tree with one for each leaf."
    _validate.broadcasts(which, bound.shape, x.shape, name, advice)
    return jnp.broadcast_to(bound, x.shape)
