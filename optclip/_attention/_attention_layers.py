"""Locate the heads of attention layers in a tree of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree
from ._heads import Heads, listed


class Place(NamedTuple):
    """Describe where a leaf holds the heads of a layer.

    Attributes:
      path: Path of the leaf.
      number: Index of the leaf in the flattened tree.
      ndim: Number of axes of the leaf.
      axes: The axes of layers (if stacked), of heads, and of features (if needed).
      heads: Number of heads.
      features: Number of features per head.
      layers: Number of layers; 1 if not stacked.
      is_flat: Whether the axis of heads also contains the features.
    """

    path: str
    number: int
    ndim: int
    axes: tuple[int, ...]
    heads: int
    features: int
    layers: int
    is_flat: bool


class Layer(NamedTuple):
    """Describe an attention layer in a tree, or a stack of layers.

    Attributes:
      name: Name of the layer.
      query: Places of the query leaves.
      key: Places of the key leaves.
      logits: Shape of the largest logits: query heads, after layers if stacked.
      groups: Number of key heads.
      width: Number of entries per query head that multiply a separate key; None if all.
    """

    name: str
    query: list[Place]
    key: list[Place]
    logits: tuple[int, ...]
    groups: int
    width: int | None


def layers_in(params: PyTree, layers: Mapping[str, Heads]) -> list[Layer]:
    """Locate the heads of each layer in a tree.

    Raises:
      ValueError: A leaf is missing, is named twice, or does not have such heads.
    """
    check_layers(layers)
    flat = _leaves.flatten(params)
    index = {name: i for i, name in enumerate(_leaves.names_of(flat.paths))}
    layer_of_path: dict[str, str] = {}
    located = []
    for name, heads in layers.items():
        for path in (*heads.query_paths, *heads.key_paths):
            if path not in index:
                raise ValueError(
                    f"`layers` at '{name}' must name leaves of the parameters, got"
                    f" '{path}'. The paths are {listed(sorted(index))}."
                )
            if path in layer_of_path:
                raise ValueError(
                    f"`layers` must name each leaf once, got '{path}' in"
                    f" '{layer_of_path[path]}' and '{name}'. Heads cannot be clipped"
                    " in a leaf that holds both queries and keys; use two leaves."
                )
            layer_of_path[path] = name
        located.append(_layer(name, heads, flat, index))
    return located


def check_layers(layers: Any) -> None:
    """Raise unless `layers` is a dict of `Heads` by name."""
    wanted = "a dict from the name of a layer to its optclip.Heads"
    advice = "optclip.find_heads builds it from path patterns."
    _validate.kind("layers", layers, Mapping, wanted, advice)
    _validate.require("layers", layers, bool(layers), wanted, advice)
    for name, heads in layers.items():
        _validate.kind("A name in `layers`", name, str, "a string")
        _validate.kind(f"`layers` at '{name}'", heads, Heads, "an optclip.Heads")


def _layer(name: str, heads: Heads, flat: _leaves.Flat, index: dict[str, int]) -> Layer:
    def place(path: str, count: int | None) -> Place:
        i = index[path]
        leaf = flat.leaves[i]
        if _leaves.is_sparse(leaf) or not _leaves.is_clippable(flat.paths[i], leaf):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise ValueError(
                f"The leaf '{path}' in `layers` must be a dense floating-point array,"
                f" got {kind}. Name the weights of the projection."
            )
        return _place(heads, path, i, jnp.shape(leaf), count)

    query = [place(path, None) for path in heads.query_paths]
    q = query[0]
    # The key leaf of MLA also holds values, so its heads are larger than those of the
    # query, and the number of heads must come from the query.
    count = q.heads if heads.rope and heads.head_dim else None
    key = [place(path, count) for path in heads.key_paths]
    k = key[0]
    for first, leaf in [*((q, leaf) for leaf in query), *((k, leaf) for leaf in key)]:
        if (leaf.heads, leaf.layers) != (first.heads, q.layers):
            raise ValueError(
                f"The leaves of the layer '{name}' must have the same number of heads"
                f" and layers, got {leaf.heads} and {leaf.layers} in '{leaf.path}',"
                f" expected {first.heads} as in '{first.path}' and {q.layers} as in"
                f" '{q.path}'. Check axis=, head_dim= and stacked= of its"
                " optclip.Heads."
            )
    if not q.heads or not k.heads or q.heads % k.heads:
        raise ValueError(
            f"In the layer '{name}' the number of key heads must divide the number of"
            f" query heads, got {k.heads} in '{k.path}' and {q.heads} in '{q.path}'."
            " Check axis= and head_dim= of its optclip.Heads."
        )
    width = q.features - heads.rope if heads.rope else None
    if width is not None:
        _check_rotary(heads.rope, width, query, key)
    elif heads.head_dim is None:
        last = {jnp.shape(flat.leaves[index[leaf.path]])[-1] for leaf in (q, k)}
        _check_features(name, q, k, last)
    stack = () if heads.stacked is None else (q.layers,)
    return Layer(name, query, key, (*stack, q.heads), k.heads, width)


def _check_features(name: str, q: Place, k: Place, last: set[int]) -> None:
    """Raise if query and key heads differ in size, whichever axis holds the features.

    `last` is the set of lengths of the last axes.
    """
    if q.features != k.features and len(last) > 1:
        raise ValueError(
            f"The query and key heads of the layer '{name}' must have the same size,"
            f" got {q.features} in '{q.path}' and {k.features} in '{k.path}'. If the"
            " key leaf also holds values, or heads share a rotary key (MLA), pass"
            " rope= to its optclip.Heads; otherwise check axis=."
        )


def _check_rotary(rope: int, width: int, query: list[Place], key: list[Place]) -> None:
    """Raise unless each head has the rotary entries, and each key the other entries."""
    pairs = [(place, rope + 1) for place in query] + [(place, width) for place in key]
    for place, least in pairs:
        if place.features < least:
            raise ValueError(
                f"Each head of '{place.path}' must have at least {least} entries, since"
                f" {rope} of the {width + rope} entries of a query head are rotary, got"
                f" {place.features}. Check rope= and axis= of its optclip.Heads."
            )


def _place(
    heads: Heads, path: str, number: int, shape: tuple[int, ...], count: int | None
) -> Place:
    """Locate the heads of a leaf; `count` is their number if it is known."""
    axis = _axis_of("axis", heads.axis, path, shape)
    axes = (axis,)
    if heads.head_dim is None:
        num_heads = shape[axis]
        features = shape[axis + 1] if axis + 1 < len(shape) else 0
        if heads.rope:
            axes = (axis, axis + 1)
    else:
        features = heads.head_dim if count is None else shape[axis] // max(count, 1)
        num_heads = shape[axis] // features if features else 0
        if num_heads * features != shape[axis]:
            raise ValueError(
                f"The length of axis {axis} of '{path}' must be a multiple of the head"
                f" size {features}, got {shape[axis]}. Check head_dim= and axis= of its"
                " optclip.Heads."
            )
    layers = 1
    if heads.stacked is not None:
        stack = _axis_of("stacked", heads.stacked, path, shape)
        if stack in axes:
            raise ValueError(
                f"`stacked` and the axis of heads must differ, got axis {stack} for"
                f" both in '{path}' of shape {shape}. Check axis= and stacked= of its"
                " optclip.Heads."
            )
        axes, layers = (stack, *axes), shape[stack]
    return Place(
        path, number, len(shape), axes, num_heads, features, layers,
        is_flat=heads.head_dim is not None,
    )  # fmt: skip


def _axis_of(name: str, axis: int, path: str, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`{name}` must be an axis of '{path}' of shape {shape}, got {axis}."
            " Change it in its optclip.Heads."
        )
    return axis % len(shape)
