"""APPLY by head: which leaves have which heads, and what each is scaled by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _axis_names, _collectives, _leaves, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import Leaf, Number, PyTree
from optclip._clip import _head_names
from optclip._clip._clip import Clip, ScalingClip
from optclip.norms._norm import INF
from optclip.responses import Hard
from optclip.scopes._heads import BY_HEAD, Heads

# A smaller coefficient is split between query and key as this one is, so that neither
# quotient leaves the range.
_LEAST = 2.0**-60


class Place(NamedTuple):
    """Where a leaf has the heads of a layer.

    `axes` are those of the layers, if stacked, of the heads and of the features, if
    there are any; `is_flat` says whether the last two are one.
    """

    path: str
    leaf: int
    ndim: int
    axes: tuple[int, ...]
    heads: int
    features: int
    is_flat: bool


class Layer(NamedTuple):
    """An attention layer in a tree, or a stack of `layers` of them."""

    name: str
    query: list[Place]
    key: list[Place]
    shape: tuple[int, ...]
    rope: int


def clip_of() -> ScalingClip:
    """The clip of largest logits, each by itself."""
    # Where types say nothing the logits are the same on all devices, as asked for.
    axis_name = () if _axis_names.untyped_axes() else None
    return ScalingClip(BY_HEAD, INF, Hard(), nonfinite="zero", axis_name=axis_name)


def layers_in(params: PyTree, layers: Mapping[str, Heads]) -> list[Layer]:
    """The layers as they are in a tree.

    Raises:
      ValueError: a leaf is not there, is named twice, or does not have such heads; or a
        layer normalizes its queries and keys.
    """
    check_layers(layers)
    flat = _leaves.flatten(params)
    index = {name: i for i, name in enumerate(_leaves.names_of(flat.paths))}
    known: dict[str, str] = {}
    found = []
    for name, heads in layers.items():
        for path in (*heads.query_paths, *heads.key_paths):
            _head_names.check_there(name, path, index)
            if path in known:
                raise ValueError(
                    f"`layers` must name each leaf once, got '{path}' in"
                    f" '{known[path]}' and '{name}'. A leaf with queries and keys in"
                    " one cannot be clipped by head: keep them in two."
                )
            known[path] = name
        _head_names.check_not_normalized(name, heads, index)
        found.append(_layer(name, heads, flat, index))
    return found


def check_layers(layers: Any) -> None:
    """Raise unless this is a dict of `Heads` by name."""
    wanted = "a dict from the name of a layer to its optclip.Heads"
    advice = "optclip.find_heads makes one from path patterns."
    _validate.kind("layers", layers, Mapping, wanted, advice)
    if not layers:
        raise ValueError(_validate.must_be("layers", wanted, layers, advice))
    for name, heads in layers.items():
        if not isinstance(name, str):
            raise TypeError(_validate.must_be("A name in `layers`", "a string", name))
        _validate.kind(f"`layers` at '{name}'", heads, Heads, "an optclip.Heads")


def _layer(name: str, heads: Heads, flat: _leaves.Flat, index: dict[str, int]) -> Layer:
    def place(path: str, number: int | None) -> tuple[Place, int]:
        i = index[path]
        return _place(heads, path, i, flat.paths[i], flat.leaves[i], number)

    query = [place(path, None) for path in heads.query_paths]
    # The key of MLA has values in the same leaf, so that a head has more entries.
    number = query[0][0].heads if heads.rope and heads.head_dim else None
    key = [place(path, number) for path in heads.key_paths]
    for of in (query, key):
        for own, layers in of:
            if own.heads != of[0][0].heads or layers != query[0][1]:
                raise ValueError(
                    f"The leaves of the layer '{name}' must have one number of heads"
                    f" and of layers, got {of[0][0].heads} and {query[0][1]} in"
                    f" '{of[0][0].path}', {own.heads} and {layers} in '{own.path}'."
                    " Check axis=, head_dim= and stacked= of its optclip.Heads."
                )
    queries, keys = query[0][0], key[0][0]
    if not keys.heads or queries.heads % keys.heads:
        raise ValueError(
            f"The key heads of the layer '{name}' must divide its query heads, got"
            f" {keys.heads} in '{keys.path}' and {queries.heads} in '{queries.path}'."
            " Check axis= and head_dim= of its optclip.Heads."
        )
    if heads.rope:
        _check_widths(name, heads.rope, query, key)
    shape = (queries.heads,) if heads.stacked is None else (query[0][1], queries.heads)
    return Layer(name, [q for q, _ in query], [k for k, _ in key], shape, heads.rope)


def _check_widths(
    name: str, rope: int, query: list[tuple[Place, int]], key: list[tuple[Place, int]]
) -> None:
    """Raise unless heads have the entries that are rotary, and others besides."""
    features = query[0][0].features
    wanted = [(own, rope + 1) for own, _ in query]
    wanted += [(own, features - rope) for own, _ in key]
    for own, least in wanted:
        if own.features < least:
            raise ValueError(
                f"Each head of '{own.path}' must have at least {least} entries, since"
                f" {rope} of the query's {features} are rotary, got {own.features}."
                f" Check rope= of the optclip.Heads of '{name}'."
            )


def _place(
    heads: Heads, path: str, index: int, keys: Any, leaf: Leaf, number: int | None
) -> tuple[Place, int]:
    """Where a leaf has heads, `number` of them if known; and how many layers."""
    if _leaves.is_sparse(leaf) or not _leaves.is_clippable(keys, leaf):
        wanted = "a dense array of a floating-point dtype"
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        raise ValueError(f"The leaf '{path}' must be {wanted}, got {kind}.")
    shape = jnp.shape(leaf)
    axis = _axis_of("axis", heads.axis, path, shape)
    size, is_flat = shape[axis], heads.head_dim is not None
    if heads.head_dim is None:
        count = size
        features = shape[axis + 1] if axis + 1 < len(shape) else 0
    else:
        features = heads.head_dim if number is None else size // max(number, 1)
        count = size // max(features, 1)
        if count * features != size:
            raise ValueError(
                f"The axis {axis} of '{path}' must have heads times"
                f" {features or 'some'} entries, got {size}. Check head_dim= and axis="
                " of its optclip.Heads."
            )
    axes = (axis,)
    if heads.rope and not is_flat:
        axes = (axis, axis + 1)
    if heads.stacked is None:
        return Place(path, index, len(shape), axes, count, features, is_flat), 1
    stack = _axis_of("stacked", heads.stacked, path, shape)
    if stack in axes:
        raise ValueError(
            f"`stacked` must be another axis than those of heads, got {heads.stacked}"
            f" for '{path}' of shape {shape}, whose heads are at {axes}."
        )
    axes = (stack, *axes)
    return Place(path, index, len(shape), axes, count, features, is_flat), shape[stack]


def _axis_of(name: str, axis: int, path: str, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`{name}` must be an axis of '{path}' of shape {shape}, got {axis}."
            " Name the leaf in an optclip.Heads with axes that it has."
        )
    return axis % len(shape)


def logits_of(
    layers: list[Layer], max_logits: Any, leaves: list[Leaf]
) -> dict[str, jax.Array]:
    """The largest logits of each layer, inf in place of those of no use.

    Zero and negative ones say nothing of the size of weights, and neither does a head
    that is masked all over.
    """
    wanted = "a dict from the name of a layer to the largest logit of each head"
    advice = "optclip.functional.max_attention_logit computes these."
    _validate.kind("max_logits", max_logits, Mapping, wanted, advice)
    names = {layer.name for layer in layers}
    if names != max_logits.keys():
        raise ValueError(
            f"`max_logits` must have the names of `layers`, {sorted(names)}, got"
            f" {sorted(max_logits, key=str)}. Give one entry for each layer."
        )
    return {
        layer.name: _usable(layer, max_logits[layer.name], leaves[layer.query[0].leaf])
        for layer in layers
    }


def _usable(layer: Layer, given: Any, query: Leaf) -> jax.Array:
    subject = f"`max_logits` at '{layer.name}'"
    if not _validate.is_number(given):
        raise TypeError(_validate.must_be(subject, "an array of real numbers", given))
    x = jnp.asarray(given)
    if x.shape != layer.shape:
        of = "layers and query heads" if len(layer.shape) == 2 else "query heads"
        raise ValueError(
            f"{subject} must have the shape {layer.shape} of {of} that"
            f" '{layer.query[0].path}' has, got {x.shape}. Give one largest logit a"
            " head."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    x = jax.lax.stop_gradient(_leaves.widen(x))
    kinds = jax.typeof(x), jax.typeof(jnp.asarray(query))
    apart = _axis_names.varying(kinds[0]) - _axis_names.varying(kinds[1])
    x = _collectives.largest_or_nan(x, tuple(sorted(apart, key=str)))
    return jnp.where(jnp.isfinite(x) & (x > 0), x, jnp.inf)


def coefficients(clip: Clip[Any, Any], measured: Batched, limits: Batched) -> Batched:
    """What the logits of each head are to be multiplied by; 1 where that is unknown."""
    found = clip.coefficients(measured, limits)

    def known(norm: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(norm) & ~jnp.isnan(k), k, jnp.ones_like(k))

    return measured.map(known, found)


def factors(
    layer: Layer, coefficient: jax.Array, balance: Number, *, by_group: bool
) -> tuple[jax.Array, dict[int, jax.Array]]:
    """What the logits of each head are multiplied by, and so each leaf by its index.

    A key head takes its share of the smallest coefficient of its group, each query head
    what is left of its own.
    """
    grouped = coefficient.reshape(*layer.shape[:-1], layer.key[0].heads, -1)
    least = jnp.min(grouped, -1, keepdims=True)
    if by_group:
        grouped = jnp.broadcast_to(least, grouped.shape)
    power = jnp.maximum(least, _LEAST) ** (1 - jnp.asarray(balance, least.dtype))
    share = jnp.where(least == 1, jnp.ones_like(least), power)
    whole = grouped.reshape(layer.shape)
    query = (grouped / share).reshape(layer.shape)
    key = share[..., 0]
    width = layer.query[0].features - layer.rope
    found = {}
    for place in layer.query:
        found[place.leaf] = _spread(place, layer, query, whole, width)
    for place in layer.key:
        found[place.leaf] = _spread(place, layer, key, jnp.ones_like(key), width)
    return whole, found


def _spread(
    place: Place, layer: Layer, first: jax.Array, rest: jax.Array, width: int
) -> jax.Array:
    """A factor that broadcasts to a leaf: `first` for the entries before `width`."""
    factor = first
    if layer.rope:
        is_first = jnp.arange(place.features) < width
        factor = jnp.where(is_first, first[..., None], rest[..., None])
    elif place.is_flat:
        factor = jnp.broadcast_to(first[..., None], (*first.shape, place.features))
    if place.is_flat:
        factor = factor.reshape(*factor.shape[:-2], -1)
    order = sorted(range(len(place.axes)), key=place.axes.__getitem__)
    others = [a for a in range(place.ndim) if a not in place.axes]
    return jnp.expand_dims(factor.transpose(order), others)
