"""Move the elements of leaves to one threshold, or to two bounds."""

from __future__ import annotations

from typing import NamedTuple, cast

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
from optclip._clip._action import Action, as_limit, check_replicated, zero_below
from optclip._clip._clip import Clip, Decision
from optclip._clip._element_bounds import ElementResponse, bounded
from optclip._clip._layout import LaidOutLeaf


class Limits(NamedTuple):
    """Hold two thresholds for the elements of a leaf, which broadcast to its shape."""

    lower: Number
    upper: Number


class Move(Action):
    """Move each element to its bound, by a response that defines `element`.

    There is one threshold, or two, and one coefficient per leaf, each of which
    broadcasts to it. Norms are read only for their shape and dtype.
    """

    def fit(
        self, clip: Clip, values: dict[str, list[Number] | Batched], norms: Batched
    ) -> Batched:
        """Return one threshold per leaf, at least 0, or its two bounds as `Limits`.

        Raises:
          ValueError: A threshold does not broadcast to the shape of its leaf.
        """
        by_name = {
            name: x.entries() if isinstance(x, Batched) else x
            for name, x in values.items()
        }
        if len(by_name) == 2:
            pairs = zip(by_name["lower"], by_name["upper"], strict=True)
            return Batched.unstacked([Limits(*pair) for pair in pairs])
        ((name, of_leaves),) = by_name.items()
        pairs = zip(of_leaves, norms.entries(), strict=True)
        return Batched.unstacked([_fitted(clip, name, *pair) for pair in pairs])

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
        return moved, Batched.unstacked(coefficients)

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
    """Return a threshold that broadcasts to the elements, at least 0."""
    _validate.broadcasts(name, jnp.shape(value), norm.shape, "the elements")
    dtype = _leaves.real_dtype(norm.dtype)
    limit = as_limit(value, dtype, towards_zero=clip.strict)
    check_replicated(clip, name, limit, norm)
    return jnp.asarray(zero_below(0.0, limit))


def _moved_leaf(
    clip: Clip, leaf: LaidOutLeaf, limit: jax.Array | Limits
) -> tuple[Leaf, jax.Array]:
    """Return a leaf with its elements moved, and how much each shrank."""
    x = jnp.asarray(leaf.array)
    lower, upper = limit if isinstance(limit, Limits) else (-limit, limit)
    name = _leaves.named(leaf.path)
    for which, bound in (("lower", lower), ("upper", upper)):
        _axis_names.check_replicated(which, bound, x)
        if leaf.matrix is not None:
            _check_sparse(name, which, bound)
    cleaned = clip.nonfinite == "zero"
    # `parts_of` chooses this action only for such responses.
    response = cast(ElementResponse, clip.response)
    out, shrunk = bounded(
        name, x, lower, upper, response, leaf.like, strict=clip.strict, cleaned=cleaned
    )
    if leaf.matrix is None:
        return out, shrunk
    is_unclipped = jnp.all(shrunk == 1)
    if cleaned:
        off = jnp.isinf(lower) & jnp.isinf(upper)
        is_unclipped &= off | jnp.all(jnp.isfinite(x))
    return _sparse.wrapped(is_unclipped, leaf.value, leaf.matrix, out), shrunk


def _check_sparse(name: str, which: str, bound: Number) -> None:
    """Raise unless a bound of a BCOO matrix is one number that keeps zeros."""
    advice = "Pass a number or a schedule, or make the leaf dense with todense()."
    if jnp.ndim(bound):
        raise ValueError(
            f"`{which}` must be one number for {name}, a BCOO matrix, got an array of"
            f" shape {jnp.shape(bound)}. {advice}"
        )
    known = _validate.concrete(bound)
    if known is not None and (known > 0 if which == "lower" else known < 0):
        wanted = "at most 0" if which == "lower" else "at least 0"
        wanted += f" for {name}, a BCOO matrix, whose zeros are not stored"
        raise ValueError(_validate.must_be(which, wanted, bound, advice))


def _nearer(limit: jax.Array | Limits) -> jax.Array:
    """Return the threshold, or the smaller modulus of two bounds, for the record."""
    if not isinstance(limit, Limits):
        return limit
    lower, upper = (jnp.abs(jnp.asarray(x, jnp.float32)) for x in limit)
    return jnp.minimum(_maxima.smallest(lower), _maxima.smallest(upper))
