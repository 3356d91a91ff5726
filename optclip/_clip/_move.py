"""Move elements to one threshold, or to two bounds, and choose the action of a clip."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    _leaf,
    _leaves,
    _numerics,
    _placement,
    _validate,
)
from .._arrays._batching import Batched
from .._arrays._leaf import Leaf
from .._arrays._types import Number
from .._norms import Measurement, declared_of
from .._responses import BaseResponse
from .._scopes import EachElement, Scope
from . import _samples, _scale
from ._bounded import ElementResponse, Limits, bounded
from ._clip import (
    ActingScope,
    Action,
    BlockOutcome,
    ByArgument,
    Clip,
    Decision,
    as_limit,
    check_replicated,
    zero_below,
)


class Move(Action):
    """Move each element to its bound, by a response that defines `element`.

    There is one threshold, or two, and one coefficient per leaf, each of which
    broadcasts to it. Norms are read only for their shape and dtype.
    """

    def fit(self, clip: Clip, values: ByArgument, norms: Batched) -> Batched:
        """Return the limits of each leaf, of which a single threshold is at least 0.

        Raises:
          ValueError: A threshold does not broadcast to the shape of its leaf.
        """
        by_name = {
            name: x.entries() if isinstance(x, Batched) else x
            for name, x in values.items()
        }
        if len(by_name) == 2:
            pairs = zip(by_name["lower"], by_name["upper"], strict=True)
            return Batched.unstacked([_two_sided(*pair) for pair in pairs])
        ((name, of_leaves),) = by_name.items()
        pairs = zip(of_leaves, norms.entries(), strict=True)
        limits = [_fitted(clip, name, *pair) for pair in pairs]
        return Batched.unstacked([Limits(-x, x, is_symmetric=True) for x in limits])

    def apply(self, decision: Decision) -> tuple[dict[int, object], Batched]:
        """Return the clipped leaves by index, and how much each element shrank."""
        layout, limits = decision.layout, decision.thresholds.entries()
        samples = (decision.samples or {}).items()
        counts = {block: x.clipped for blocks, x in samples for block in blocks}
        moved = {}
        coefficients = [jnp.ones(())] * len(layout.blocks)
        for i, leaf, block in layout.scaled:
            moved[i], coefficients[block] = _moved_leaf(
                decision.clip, leaf, limits[block], counts.get(block)
            )
        return moved, Batched.unstacked(coefficients)

    def recorded(
        self, decision: Decision, coefficients: Batched
    ) -> tuple[Batched, Batched]:
        """Return the bound of each element, or one per leaf if all have one."""
        norms = decision.norms
        if not decision.layout.blocks:
            return norms, norms
        numbers = range(len(decision.layout.blocks))
        entries = zip(numbers, norms.entries(), coefficients.entries(), strict=True)
        bounds, full = zip(*(_recorded(decision, *x) for x in entries), strict=True)
        return norms.with_entries([*bounds]), norms.with_entries([*full])

    def sampled(self, decision: Decision, *, itemized: bool) -> Decision:
        """Return the decision with the largest elements of leaves with one bound."""
        return decision._replace(samples=_samples_of(decision, itemized=itemized))

    def outcomes(self, decision: Decision, coefficients: Batched) -> Batched:
        """Return a `BlockOutcome` for each block, or for some at once."""
        if not decision.samples:
            return super().outcomes(decision, coefficients)
        by_first = {blocks[0]: x for blocks, x in decision.samples.items()}
        known = {block for blocks in decision.samples for block in blocks}
        norms, factors = decision.norms.entries(), coefficients.entries()
        for i in range(len(norms)):
            if i not in known:
                limit, factor = _recorded(decision, i, norms[i], factors[i])
                by_first[i] = _outcome(decision, i, (norms[i], limit, factor))
        return Batched.unstacked([by_first[i] for i in sorted(by_first)])


MOVE: Move = Move()


def clip_of(
    scope: Scope,
    norm: Measurement,
    response: BaseResponse,
    eps: Number = 0.0,
    **options: Any,
) -> Clip:
    """Build the `Clip` for a scope; options are as the user passed them."""
    action: Action = _scale.SCALE
    if isinstance(scope, ActingScope):
        norm, action = scope.parts(norm, response, eps)
    elif isinstance(scope, EachElement) and hasattr(response, "element"):
        # Bounds have no place for `eps`, which only coefficients read.
        known = _validate.concrete(eps)
        has_eps = known is None or np.any(known != 0)
        action = _scale.SCALE if has_eps else MOVE
    clip = Clip(scope, norm, response, action, eps, **options)
    _validate.require(
        "strict",
        clip.strict,
        norm.is_entrywise or not clip.strict,
        "False for norms that are not entrywise, such as spectral norms",
        "Elements are rounded one by one, which can increase such a norm.",
    )
    _validate.require(
        "strict",
        clip.strict,
        not (clip.strict and response.signed),
        "False for a response with `signed = True`",
        "Its parameter bounds no norm.",
    )
    return clip


def _fitted(clip: Clip, name: str, value: Number, norm: jax.Array) -> jax.Array:
    """Return a threshold that broadcasts to the elements, at least 0."""
    _validate.broadcasts(name, jnp.shape(value), norm.shape, "the elements")
    dtype = _leaves.real_dtype(norm.dtype)
    value = _placement.beside(value, norm)
    limit = as_limit(value, dtype, towards_zero=clip.strict)
    check_replicated({name: limit, "eps": clip.eps}, norm)
    return jnp.asarray(zero_below(clip, 0.0, limit))


def _moved_leaf(
    clip: Clip, leaf: Leaf, limits: Limits, count: jax.Array | None
) -> tuple[object, jax.Array]:
    """Return a leaf with its elements moved, and how much each shrank.

    Args:
      clip: The clipping operation.
      leaf: The leaf.
      limits: Its bounds.
      count: What is computed from the leaf before its elements move; None for nothing.
    """
    x = _leaves.as_jax(leaf.array)
    lower, upper = (_placement.beside(bound, x) for bound in limits[:2])
    name = _leaves.named(leaf.path)
    of_side = {"lower": lower, "upper": upper}
    check_replicated(of_side, x)
    for which, bound in of_side.items() if leaf.matrix is not None else ():
        _check_sparse(name, which, bound)
    if count is not None:
        wide = _leaves.real_dtype(x.dtype)
        bounds = (
            as_limit(bound, wide, towards_zero=clip.strict) for bound in (lower, upper)
        )
        lower, upper = _samples.after(count, *bounds)
    cleaned = clip.nonfinite == "zero"
    # `clip_of` chooses this action only for such responses.
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
    return _leaf.wrapped(is_unclipped, leaf.value, leaf.matrix, out), shrunk


def _check_sparse(name: str, which: str, bound: Number) -> None:
    """Raise unless a bound of a BCOO matrix is one number that keeps zeros."""
    advice = "Pass a number or a schedule, or make the leaf dense with todense()."
    if jnp.ndim(bound):
        raise ValueError(
            f"`{which}` must be one number for {name}, a BCOO matrix, got an array of"
            f" shape {jnp.shape(bound)}. {advice}"
        )
    known, side = _validate.concrete(bound), "most" if which == "lower" else "least"
    _validate.require(
        which, bound, known is None or not (known > 0 if side == "most" else known < 0),
        f"at {side} 0 for {name}, a BCOO matrix, whose zeros are not stored", advice,
    )  # fmt: skip


def _two_sided(lower: Number, upper: Number) -> Limits:
    is_symmetric = False
    if jnp.ndim(lower) == jnp.ndim(upper) == 0:
        low, high = _validate.concrete(lower), _validate.concrete(upper)
        is_symmetric = low is not None and high is not None and bool(low == -high)
    return Limits(lower, upper, is_symmetric)


def _on_its_side(leaf: Leaf, limits: Limits) -> jax.Array:
    """Return the modulus of the bound that each element may exceed."""
    if limits.is_symmetric:
        return jnp.asarray(limits.upper)
    lower, upper = (jnp.abs(jnp.asarray(x, jnp.float32)) for x in limits[:2])
    return jnp.where(jnp.asarray(leaf.array) < 0, lower, upper)


def _recorded(
    decision: Decision, block: int, norm: jax.Array, coefficient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the bounds and the coefficients of the elements of a leaf."""
    (leaf,) = decision.layout.blocks[block].leaves
    bound = _on_its_side(leaf, decision.thresholds.entries()[block])
    if bound.ndim:
        bound = _numerics.broadcast_like(bound, norm)
    # No factor makes a NaN finite, so it has none.
    return bound, jnp.where(jnp.isnan(norm), norm, coefficient)


def _outcome(decision: Decision, block: int, values: Any, **more: Any) -> BlockOutcome:
    norm, threshold, coefficient = values
    declared = declared_of(decision.layout.blocks[block])
    return BlockOutcome(norm, threshold, coefficient, declared, **more)


def _samples_of(
    decision: Decision, *, itemized: bool
) -> dict[tuple[int, ...], BlockOutcome]:
    """Return the outcome of each group of leaves with one bound, or two, by blocks."""
    clip, limits = decision.clip, decision.thresholds.entries()
    if clip.response.compares_norms:
        return {}
    response = cast(ElementResponse, clip.response)
    leaves = {
        block: leaf
        for _, leaf, block in decision.layout.scaled
        if _samples.is_sampled(response, leaf, limits[block])
    }
    norms, outcomes = decision.norms.entries(), {}
    for blocks in _samples.grouped(leaves, limits, itemized=itemized):
        first, members = blocks[0], [leaves[block] for block in blocks]
        how = _samples.How(
            response, clip.strict, clip.nonfinite == "zero",
            members[0].like.dtype, norms[first].dtype,
        )  # fmt: skip
        *values, clipped = _samples.sample(how, members, [limits[i] for i in blocks])
        number = sum(jnp.size(x.array) for x in members)
        outcomes[blocks] = _outcome(
            decision, first, values, clipped=clipped, number=number
        )
    return outcomes
