"""The heads of all attention layers of a tree, found by the paths of its leaves."""

from __future__ import annotations

import fnmatch
import itertools

import jax.numpy as jnp

from optclip._arrays import _leaves, _validate
from optclip._arrays._types import PyTree
from optclip.attention._heads import Heads, check_layout

# The name of the only layer of a tree, which stands at its root.
_ROOT = "attention"


def find_heads(
    params: PyTree,
    *,
    query: str,
    key: str,
    axis: int = -2,
    rope: int = 0,
    head_dim: int | None = None,
    stacked: int | None = None,
) -> dict[str, Heads]:
    """The `layers` of `clip_attention_logits`, by the names of their projections.

    What two leaves have in common at the front of their paths pairs them, and is the
    name of the layer: `"block_0/attn"` of `"block_0/attn/query/kernel"` and
    `"block_0/attn/key/kernel"`; `"attention"` if they have nothing in common.

    Args:
      params: the parameters, any pytree of arrays or of their shapes.
      query: which leaves project to queries: the name of a module or leaf, such as
        `"query"`, at any depth; or a pattern of whole paths, such as
        `"decoder/*/query/*"`, as `fnmatch` takes it.
      key: which leaves project to keys, given in the same ways.
      axis: the axis that counts heads, in each leaf found; see `optclip.Heads`.
      rope: how many entries at the end of each query head are rotary with a key that
        all heads share (MLA); rotary embeddings of whole heads need 0.
      head_dim: how many entries a head has where `axis` counts heads and features in
        one; None is an axis of heads alone.
      stacked: the axis of each leaf that counts layers, as `nn.scan` stacks them; None
        is one layer a leaf.

    Returns:
      A dict from the name of each layer to its `optclip.Heads`, in the order of the
      leaves.

    Raises:
      TypeError: a pattern is not a string, or a number not an int.
      ValueError: a pattern matches nothing, or a query has no key or a key no query.

    ========= ====================== ===================== ==========================
    library   query                  key                   layout
    ========= ====================== ===================== ==========================
    Flax      `"query"`              `"key"`               as it is
    Equinox   `"query_proj"`         `"key_proj"`          `axis=0, head_dim=n`
    Haiku     `"query"`              `"key"`               `axis=-1, head_dim=n`
    MaxText   `"query"`              `"key"`               `stacked=1`
    ========= ====================== ===================== ==========================

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> kernel = {"kernel": jnp.ones((8, 2, 4))}
      >>> params = {"block_0": {"attn": {"query": kernel, "key": kernel}}}
      >>> layers = optclip.find_heads(params, query="query", key="key")
      >>> print(list(layers), layers["block_0/attn"].query)
      ['block_0/attn'] ('block_0/attn/query/kernel',)
    """
    check_layout(axis, rope, head_dim, stacked)
    flat = _leaves.flatten(params)
    paths = _leaves.names_of(flat.paths)
    rank_of = dict(zip(paths, map(jnp.ndim, flat.leaves), strict=True))
    queries, keys = _matches("query", query, paths), _matches("key", key, paths)
    paths_by_layer: dict[str, tuple[list[str], list[str]]] = {}
    for path in queries:
        paths_by_layer.setdefault(_in_common(path, keys), ([], []))[0].append(path)
    for path in keys:
        paths_by_layer.setdefault(_in_common(path, queries), ([], []))[1].append(path)
    for name, (query_paths, key_paths) in paths_by_layer.items():
        if not query_paths or not key_paths:
            lone = (query_paths or key_paths)[0]
            which = "key" if query_paths else "query"
            raise ValueError(
                f"Each query must have a key beside it, and each key a query, got"
                f" '{lone}' with no {which} under '{name}'. query={query!r} matches"
                f" {_listed(queries)} and key={key!r} matches {_listed(keys)}. Give"
                " patterns that match both."
            )
        for side in (query_paths, key_paths):
            _check_one_layer(name or _ROOT, side, rank_of)
    return {
        name or _ROOT: Heads(
            tuple(query_paths),
            tuple(key_paths),
            axis=axis,
            rope=rope,
            head_dim=head_dim,
            stacked=stacked,
        )
        for name, (query_paths, key_paths) in paths_by_layer.items()
    }


def _check_one_layer(name: str, paths: list[str], rank_of: dict[str, int]) -> None:
    """Raise if queries, or keys, have several kernels: of several layers, then."""
    if len({rank_of[path] for path in paths}) < len(paths):
        raise ValueError(
            "Each layer must have one kernel and at most one bias for its queries, and"
            f" for its keys, got {_listed(paths)} under '{name}'. Give narrower"
            " patterns, one call for each layer, or name them in optclip.Heads."
        )


def _matches(name: str, pattern: str, paths: list[str]) -> list[str]:
    wanted = "the name of a module, or a pattern of paths such as '*/query/*'"
    _validate.kind(name, pattern, str, wanted)
    is_path = any(sign in pattern for sign in "*?[/")
    matching = [
        path
        for path in paths
        if (
            fnmatch.fnmatchcase(path, pattern)
            if is_path
            else pattern in path.split("/")
        )
    ]
    if not matching:
        advice = f"The paths are {_listed(paths)}."
        raise ValueError(
            _validate.must_be(name, f"{wanted}, that is there", pattern, advice)
        )
    return matching


def _in_common(path: str, others: list[str]) -> str:
    """The longest front of a path, in whole words, that one of others has too."""
    words = path.split("/")

    def front(other: str) -> list[str]:
        pairs = zip(words, other.split("/"), strict=False)
        return [
            a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        ]

    return "/".join(max(map(front, others), key=len))


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
    return f"{paths[:10]}{more}"
