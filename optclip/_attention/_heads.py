"""Name the leaves that hold the heads of attention layers, and scope norms to heads."""

from __future__ import annotations

import dataclasses

from .._arrays import _validate
from .._arrays._types import KeyPath, LeafLike
from .._norms import Block
from .._scopes import PerLeaf


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
            check_paths(name, paths)
        layout = checked_layout(self.axis, self.rope, self.head_dim, self.stacked)
        for name, value in layout.items():
            object.__setattr__(self, name, value)

    @property
    def query_paths(self) -> tuple[str, ...]:
        return (self.query,) if isinstance(self.query, str) else self.query

    @property
    def key_paths(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key


def check_paths(name: str, paths: str | tuple[str, ...]) -> None:
    """Raise unless `paths` is a path or a tuple of paths."""
    wanted = "a path such as 'attn/query/kernel', or a tuple of paths"
    each = paths if isinstance(paths, tuple) else (paths,)
    if not all(isinstance(path, str) for path in each):
        raise TypeError(_validate.must_be(name, wanted, paths))
    if not each or not all(each):
        raise ValueError(_validate.must_be(name, wanted, paths))


def checked_layout(
    axis: int, rope: int, head_dim: int | None, stacked: int | None
) -> dict[str, int | None]:
    """Return these arguments as ints; raise unless they locate the heads of a leaf."""
    layout: dict[str, int | None] = {"head_dim": None, "stacked": None}
    axes = {"axis": axis} if stacked is None else {"axis": axis, "stacked": stacked}
    for name, value in axes.items():
        layout[name] = _validate.as_int(value)
        if layout[name] is None:
            raise TypeError(_validate.must_be(name, "a single int", value))
    layout["rope"] = _validate.length("rope", rope, least=0)
    if head_dim is None:
        return layout
    layout["head_dim"] = _validate.length("head_dim", head_dim)
    if rope >= head_dim:
        wanted = f"less than `head_dim`, {head_dim}"
        advice = "Rotary entries are a part of each head."
        raise ValueError(_validate.must_be("rope", wanted, rope, advice))
    return layout


@dataclasses.dataclass(frozen=True)
class ByHead(PerLeaf):
    """Compare the largest logit of each head; one block per layer."""

    def block(self, path: KeyPath, leaf: LeafLike) -> Block:
        return Block([leaf], ())


BY_HEAD: ByHead = ByHead()
