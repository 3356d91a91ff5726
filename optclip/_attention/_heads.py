"""Name or find the leaves that hold the heads of attention layers."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools

import jax.numpy as jnp

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree

# The name of a layer whose query and key paths have no common start.
_ROOT = "attention"


@dataclasses.dataclass(frozen=True)
class Heads:
    """Locate the heads of one attention layer, or of a stack, in its parameters.

    Query heads that share a key head (GQA, MQA) are adjacent, as in
    `jax.nn.dot_product_attention`.

    Example:
      >>> import optclip
      >>> optclip.Heads("attn/query/kernel", "attn/key/kernel").axis
      -2

    Args:
      query: Path of the query projection, such as `"attn/query/kernel"`, or a tuple of
        paths for kernel and bias.
      key: Path of the key projection, or a tuple of paths.
      axis: Axis that counts heads in each leaf; the next axis holds the features.
        Default: -2, as in Flax, with kernels `(d, heads, n)` and biases `(heads, n)`.
      rope: Number of rotary entries at the end of each query head that share one key
        (multi-head latent attention, MLA). Do not name the leaf of that key. In other
        key leaves only the keys are scaled, not the values. Default: 0, also for rotary
        embeddings of whole heads.
      head_dim: Entries per head if `axis` joins all heads, one after another, as in
        Haiku (`axis=-1`) and Equinox (`axis=0`). Default: None.
      stacked: Axis that counts layers, as `nn.scan` stacks them; largest logits are
        then `(layers, heads)`. Default: None, one layer.

    See Also:
      `optclip.find_heads` builds these from the parameters.
    """

    query: str | tuple[str, ...]
    key: str | tuple[str, ...]
    axis: int = dataclasses.field(default=-2, kw_only=True)
    rope: int = dataclasses.field(default=0, kw_only=True)
    head_dim: int | None = dataclasses.field(default=None, kw_only=True)
    stacked: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, paths in (("query", self.query), ("key", self.key)):
            _check_paths(name, paths)
        layout: dict[str, int | None] = {
            "axis": _validate.whole("axis", self.axis, "a single int"),
            "rope": _validate.length("rope", self.rope, least=0),
        }
        if self.stacked is not None:
            layout["stacked"] = _validate.whole("stacked", self.stacked, "a single int")
        if self.head_dim is not None:
            layout["head_dim"] = _validate.length("head_dim", self.head_dim)
            _validate.require(
                "rope",
                self.rope,
                self.rope < self.head_dim,
                f"less than `head_dim`, {self.head_dim}",
                "Rotary entries are a part of each head.",
            )
        for name, value in layout.items():
            object.__setattr__(self, name, value)

    @property
    def query_paths(self) -> tuple[str, ...]:
        return (self.query,) if isinstance(self.query, str) else self.query

    @property
    def key_paths(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key


def _check_paths(name: str, paths: str | tuple[str, ...]) -> None:
    """Raise unless `paths` is a path or a tuple of paths."""
    wanted = "a path such as 'attn/query/kernel', or a tuple of paths"
    each = paths if isinstance(paths, tuple) else (paths,)
    are_strings = all(isinstance(path, str) for path in each)
    _validate.require(name, paths, are_strings, wanted, error=TypeError)
    _validate.require(name, paths, bool(each) and all(each), wanted)


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
    """Find the heads of all attention layers by the paths of their projections.

    Pass the result as `layers` to `clip_attention_logits`. Queries and keys are paired
    by the longest common start of their paths, which names the layer: `"block_0/attn"`
    for `"block_0/attn/query/kernel"` and `"block_0/attn/key/kernel"`; `"attention"` if
    it is empty.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> kernel = {"kernel": jnp.ones((8, 2, 4))}
      >>> params = {"block_0": {"attn": {"query": kernel, "key": kernel}}}
      >>> layers = optclip.find_heads(params, query="query", key="key")
      >>> print(list(layers), layers["block_0/attn"].query)
      ['block_0/attn'] ('block_0/attn/query/kernel',)

    Args:
      params: Parameters: a pytree of arrays or `jax.ShapeDtypeStruct`.
      query: Leaves that project to queries: the name of a module or leaf, such as
        `"query"`, or an `fnmatch` pattern of paths, such as `"decoder/*/query/*"`.
      key: Leaves that project to keys, in the same forms.
      axis: Axis that counts heads. Default: -2, as in Flax.
      rope: Rotary entries per query head that share one key (MLA). Default: 0.
      head_dim: Entries per head if `axis` joins all heads. Default: None.
      stacked: Axis that counts layers, as `nn.scan` stacks them. Default: None.

    Returns:
      A dict of `optclip.Heads` by layer name, in the order of the leaves.

    Raises:
      ValueError: A pattern matches nothing, or a query has no key or a key no query.

    See Also:
      `optclip.Heads` explains the last four arguments.

    ========= ====================== ===================== ==========================
    library   query                  key                   layout
    ========= ====================== ===================== ==========================
    Flax      `"query"`              `"key"`               the default
    Equinox   `"query_proj"`         `"key_proj"`          `axis=0, head_dim=n`
    Haiku     `"query"`              `"key"`               `axis=-1, head_dim=n`
    MaxText   `"query"`              `"key"`               `stacked=1`
    ========= ====================== ===================== ==========================
    """
    flat = _leaves.flatten(params)
    paths = _leaves.names_of(flat.paths)
    rank_of = dict(zip(paths, map(jnp.ndim, flat.leaves), strict=True))
    queries, keys = _matches("query", query, paths), _matches("key", key, paths)
    paths_by_layer: dict[str, tuple[list[str], list[str]]] = {}
    for side, (these, others) in enumerate([(queries, keys), (keys, queries)]):
        shared = {start for path in others for start in _starts(path)}
        for path in these:
            layer = max(shared.intersection(_starts(path)), key=len)
            paths_by_layer.setdefault(layer, ([], []))[side].append(path)
    for name, (query_paths, key_paths) in paths_by_layer.items():
        if not query_paths or not key_paths:
            lone = (query_paths or key_paths)[0]
            raise ValueError(
                f"Each query must have a key next to it, and each key a query, got"
                f" '{lone}' with no {'key' if query_paths else 'query'} under"
                f" '{name}'. query={query!r} matches {listed(queries)} and"
                f" key={key!r} matches {listed(keys)}. Pass patterns that match both."
            )
        for side in (query_paths, key_paths):
            if len({rank_of[path] for path in side}) < len(side):
                raise ValueError(
                    "Each layer must have one kernel and at most one bias for its"
                    f" queries, and for its keys, got {listed(side)} under"
                    f" '{name or _ROOT}'. Pass narrower patterns, call find_heads once"
                    " per layer, or build optclip.Heads."
                )
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
    _validate.require(
        name,
        pattern,
        bool(matching),
        f"{wanted}, that matches a leaf",
        f"The paths are {listed(paths)}.",
    )
    return matching


def _starts(path: str) -> list[str]:
    """Return the starts of a path in whole words, from none to all of them."""
    return ["", *itertools.accumulate(path.split("/"), "{}/{}".format)]


def listed(paths: list[str]) -> str:
    more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
    return f"{paths[:10]}{more}"
