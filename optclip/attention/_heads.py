"""The heads of attention layers: which leaves hold them, and the scope of one head."""

from __future__ import annotations

import dataclasses

from optclip._arrays import _validate
from optclip._arrays._types import KeyPath, Leaf
from optclip.norms import Block
from optclip.scopes._interface import PerLeaf


@dataclasses.dataclass(frozen=True)
class Heads:
    """Where the parameters of one attention layer, or of a stack of them, have heads.

    The key may have fewer heads than the query, if their number divides that of the
    query (GQA, MQA): the heads of a group stand side by side, as in
    `jax.nn.dot_product_attention`.

    Args:
      query: the path of the query projection, such as `"block_0/attn/query/kernel"`, or
        a tuple of paths, of kernel and bias.
      key: the path of the key projection, or a tuple of paths, given in the same way.
      axis: the axis that counts heads, in each leaf: -2 in Flax, whose kernels are
        `(d, heads, n)` and biases `(heads, n)`. The features of a head are the axis
        after it.
      rope: how many entries at the end of each query head are rotary with a key that
        all heads share, that of multi-head latent attention (MLA). That key is not
        named here; of the key leaf the entries behind those that meet the query, such
        as values, are left alone. Rotary embeddings of whole heads need 0.
      head_dim: how many entries a head has where `axis` counts heads and features in
        one, head after head, like Haiku (`axis=-1`) and Equinox (`axis=0`). None is an
        axis of heads alone.
      stacked: the axis of each leaf that counts layers, as `nn.scan` stacks them;
        largest logits are then `(layers, heads)`. None is a single layer.

    Raises:
      TypeError: a path is not a string, or a number not an int.
      ValueError: there is no path, or `rope` leaves nothing of `head_dim`.

    Example:
      >>> import optclip
      >>> optclip.Heads("attn/query/kernel", "attn/key/kernel").axis
      -2
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
        check_layout(self.axis, self.rope, self.head_dim, self.stacked)

    @property
    def query_paths(self) -> tuple[str, ...]:
        return (self.query,) if isinstance(self.query, str) else self.query

    @property
    def key_paths(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key


def check_paths(name: str, paths: str | tuple[str, ...]) -> None:
    """Raise unless this is a path, or a tuple of some."""
    wanted = "a path such as 'attn/query/kernel', or a tuple of paths"
    each = paths if isinstance(paths, tuple) else (paths,)
    if not all(isinstance(path, str) for path in each):
        raise TypeError(_validate.must_be(name, wanted, paths))
    if not each or not all(each):
        raise ValueError(_validate.must_be(name, wanted, paths))


def check_layout(
    axis: int, rope: int, head_dim: int | None, stacked: int | None
) -> None:
    """Raise unless these can say where a leaf has heads."""
    axes = {"axis": axis} if stacked is None else {"axis": axis, "stacked": stacked}
    for name, value in axes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(_validate.must_be(name, "an int, one axis", value))
    _validate.length("rope", rope, least=0)
    if head_dim is None:
        return
    _validate.length("head_dim", head_dim)
    if rope >= head_dim:
        wanted = f"less than `head_dim`, {head_dim}"
        advice = "It counts the rotary entries among those of a head."
        raise ValueError(_validate.must_be("rope", wanted, rope, advice))


@dataclasses.dataclass(frozen=True)
class ByHead(PerLeaf):
    """Each head of a layer by its largest logit; one block for each layer."""

    def block(self, path: KeyPath, leaf: Leaf) -> Block:
        return Block([leaf], ())


BY_HEAD: ByHead = ByHead()
