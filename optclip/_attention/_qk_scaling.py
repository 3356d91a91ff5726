"""Compute the factor of each leaf from the largest logits of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _collectives, _leaves, _placement, _validate
from .._arrays._batching import Batched
from .._arrays._types import LeafLike, PyTree
from .._clip import SCALE, Clip, Decision, coefficients_of
from .._norms import INF
from .._responses import Hard
from .._scopes import axes
from ._attention_layers import Layer, Place

# A smaller coefficient is split between query and key as if it were this one, so that
# neither quotient leaves the range of float32.
_LEAST = 2.0**-60

_WANTED = "a dict from the name of a layer to the largest logit of each head"


def _axes(logits: PyTree) -> PyTree:
    """Return the axes that split the logits: none where types do not specify them.

    The caller must then pass logits that are the same on all devices.
    """
    declared = () if _axis_names.untyped_axes() else None
    return jax.tree.map(lambda _: declared, logits)


# One block per layer, whose norms are the largest logits of its heads.
CLIP: Clip = Clip(axes(()), INF, Hard(), SCALE, nonfinite="zero", axis_name=_axes)


def logits_of(
    layers: list[Layer], logits: Any, leaves: list[LeafLike]
) -> dict[str, jax.Array]:
    """Return the largest logits of each layer, with inf for unusable ones.

    A logit of 0 or less, or of a fully masked head, does not measure the size of the
    weights.
    """
    advice = (
        "optclip.functional.max_attention_logit computes the logits. Pass them to a"
        " transformation as tx.update(updates, state, params, logits=...), which"
        " optax.chain passes on."
    )
    _validate.kind("logits", logits, Mapping, _WANTED, advice)
    names = {layer.name for layer in layers}
    if names != logits.keys():
        raise ValueError(
            f"`logits` must have the names of `layers`, {sorted(names)}, got"
            f" {sorted(logits, key=str)}. Pass one array per layer."
        )
    largest: dict[str, jax.Array] = {}
    by_axes: dict[_axis_names.Axes, dict[str, jax.Array]] = {}
    for layer in layers:
        x = largest[layer.name] = _checked_logits(layer, logits[layer.name])
        apart = _axis_names.apart(x, jnp.asarray(leaves[layer.query[0].number]))
        by_axes.setdefault(apart, {})[layer.name] = x
    for across, together in by_axes.items():
        if across:
            largest |= _collectives.over_devices(together, across)
    usable = {k: jnp.isfinite(x) & (x > 0) for k, x in largest.items()}
    return {k: jnp.where(usable[k], x, jnp.inf) for k, x in largest.items()}


def _checked_logits(layer: Layer, logits: Any) -> jax.Array:
    """Return the checked largest logits of a layer, in float32 or wider."""
    subject = f"`logits` at '{layer.name}'"
    is_number, wanted = _validate.is_number(logits), "an array of real numbers"
    _validate.require(subject, logits, is_number, wanted, error=TypeError)
    x = jnp.asarray(_placement.on_device(logits))
    if x.shape != layer.logits:
        of = "layers and query heads" if len(layer.logits) == 2 else "query heads"
        raise ValueError(
            f"{subject} must have the shape {layer.logits} of the {of} of"
            f" '{layer.query[0].path}', got {x.shape}. Pass one largest logit per"
            " head."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        # Integers are converted, since the coefficients are fractions.
        x = x.astype(jnp.float32)
    # The gradient is stopped, so that the coefficients are constants in derivatives.
    return lax.stop_gradient(_leaves.widen(x))


def head_coefficients(decision: Decision) -> Batched:
    """Return the factor of the logits of each head; 1 where the logit is not usable."""
    coefficients = coefficients_of(decision.clip, decision.norms, decision.thresholds)

    def coefficient_or_one(norm: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(norm) & ~jnp.isnan(k), k, jnp.ones_like(k))

    return decision.norms.map(coefficient_or_one, coefficients)


def factors(
    layer: Layer, coefficient: jax.Array, leaves: list[LeafLike]
) -> dict[int, jax.Array]:
    """Return the factor of each leaf by its index, from the coefficient of each head.

    A key head is multiplied by the root of the smallest coefficient in its group. Each
    query head is multiplied by the rest of its own coefficient.
    """
    grouped = coefficient.reshape(*layer.logits[:-1], layer.groups, -1)
    least = jnp.min(grouped, -1, keepdims=True)
    if apart := _axis_names.apart(least, jnp.asarray(leaves[layer.key[0].number])):
        if layer.groups > 1:
            raise ValueError(
                f"The key heads of the layer '{layer.name}' must be split over the mesh"
                f" axes {apart}, like its query heads and logits, got {layer.groups}"
                " on each device. Split them too, or reduce the logits over these axes:"
                f" {_axis_names.maximum_of('logits', apart)}."
            )
        # `pmin` has no derivative, so its operand must be a constant.
        least = lax.pmin(lax.stop_gradient(least), apart)
    share = jnp.sqrt(jnp.maximum(least, _LEAST))
    query = (grouped / share).reshape(layer.logits)
    key = jnp.squeeze(share, -1)
    sides = (layer.query, query, coefficient), (layer.key, key, jnp.ones_like(key))
    return {
        place.number: _spread(place, first, rest, layer.width)
        for places, first, rest in sides
        for place in places
    }


def _spread(
    place: Place, first: jax.Array, rest: jax.Array, width: int | None
) -> jax.Array:
    """Return a factor that broadcasts to a leaf.

    Entries before `width` are multiplied by `first`, the others by `rest`.
    """
    factor = first
    if width is not None:
        is_first = jnp.arange(place.features) < width
        factor = jnp.where(is_first, first[..., None], rest[..., None])
    elif place.is_flat:
        factor = jnp.broadcast_to(first[..., None], (*first.shape, place.features))
    if place.is_flat:
        factor = factor.reshape(*factor.shape[:-2], -1)
    order = sorted(range(len(place.axes)), key=place.axes.__getitem__)
    others = [a for a in range(place.ndim) if a not in place.axes]
    return jnp.expand_dims(factor.transpose(order), others)
