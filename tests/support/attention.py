"""Implement attention in NumPy float64, with projections in several layouts."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

import optclip

MODEL, WIDTH, ROTARY, VALUES = 12, 8, 4, 6
# The largest logits of two layers. Each group of GQA has some above 100 and some below;
# otherwise the exact form and Megatron's would give the same result.
LARGEST = np.array(
    [[150, 100, 20, 400, 3000, 50], [60, 1000, 250, 100, 101, 7]], np.float32
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describe how a library arranges kernels of (layers, model, heads, features).

    `axes` are the first letters of these axes in their order; biases have no `d`.
    """

    id: str
    axes: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    biased: bool = True

    @property
    def layers(self) -> int:
        return 2 if "l" in self.axes else 1

    def pack(self, x: np.ndarray) -> np.ndarray:
        present = "ldhn" if x.ndim == 4 else "lhn"
        axes = "".join(a for a in self.axes if a in present)
        x = np.einsum(f"{present}->{axes}", x)
        at = axes.index("h")
        is_flat = "head_dim" in self.options
        return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]) if is_flat else x

    def unpack(self, leaf: Any, heads: int, present: str) -> np.ndarray:
        """Return the leaf in float64 with axes (layers, model, heads, features)."""
        x = np.asarray(leaf).astype(np.float64)
        axes = "".join(a for a in self.axes if a in present)
        at = axes.index("h")
        if "head_dim" in self.options:
            x = x.reshape(*x.shape[:at], heads, -1, *x.shape[at + 1 :])
        missing = "".join(a for a in present if a not in axes)
        return np.einsum(f"{missing}{axes}->{present}", x[None] if missing else x)


LAYOUTS = [
    Layout("flax", "dhn"),
    Layout("haiku", "dhn", {"axis": -1, "head_dim": WIDTH}),
    Layout("equinox", "hnd", {"axis": 0, "head_dim": WIDTH}),
    Layout("scanned", "ldhn", {"stacked": 0}),
    # Their biases would have the layers on another axis.
    Layout("maxtext", "dlhn", {"stacked": 1}, biased=False),
    Layout("heads first", "hnd", {"axis": 0}),
    Layout("flat stack", "dlhn", {"axis": -1, "head_dim": WIDTH, "stacked": 1}, False),
    Layout("layers last", "hndl", {"axis": 0, "stacked": -1}),
]


class Kind(NamedTuple):
    """Hold a kind of attention with its numbers of heads."""

    id: str
    heads: int
    groups: int


MHA, GQA = Kind("mha", 4, 4), Kind("gqa", 6, 2)
MQA, MLA = Kind("mqa", 4, 1), Kind("mla", 4, 4)
KINDS = [MHA, GQA, MQA, MLA]


@dataclasses.dataclass(frozen=True)
class Model:
    """Hold attention layers; compute their parameters and logits."""

    layout: Layout = LAYOUTS[0]
    kind: Kind = GQA

    @property
    def is_mla(self) -> bool:
        return self.kind.id == "mla"

    @property
    def heads(self) -> dict[str, int]:
        return {"query": self.kind.heads, "key": self.kind.groups}

    def params(self, dtype: Any = np.float32) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        # A key leaf of MLA contains the values instead of the shared rotary entries.
        widths = {"query": WIDTH, "key": WIDTH + self.is_mla * (VALUES - ROTARY)}
        params = {"shared": rng.normal(size=(MODEL, ROTARY)).astype(dtype)}
        layers = self.layout.layers
        for name, heads in self.heads.items():
            shapes = {"kernel": (layers, MODEL, heads, widths[name])}
            if self.layout.biased:
                shapes["bias"] = (layers, heads, widths[name])
            params[name] = {
                leaf: self.layout.pack(rng.normal(size=shape)).astype(dtype)
                for leaf, shape in shapes.items()
            }
        return params

    def layers(self) -> dict[str, optclip.Heads]:
        leaves = ["kernel", "bias"] if self.layout.biased else ["kernel"]
        query, key = (tuple(f"{p}/{leaf}" for leaf in leaves) for p in self.heads)
        rope = ROTARY if self.is_mla else 0
        return {"attn": optclip.Heads(query, key, rope=rope, **self.layout.options)}

    def largest(self, largest: Any = LARGEST) -> dict[str, np.ndarray]:
        """Return largest logits in the shape that the layers expect."""
        rows = largest[: self.layout.layers, : self.kind.heads]
        return {"attn": rows if "stacked" in self.layout.options else rows[0]}

    def parts(self, params: Any) -> dict[tuple[str, str], np.ndarray]:
        """Return the projections in float64 as (layers, heads, features, ...)."""
        return {
            (name, leaf): self.layout.unpack(
                x, heads, "lhnd" if leaf == "kernel" else "lhn"
            )
            for name, heads in self.heads.items()
            for leaf, x in params[name].items()
        }

    def clipped(
        self, params: Any, gamma: np.ndarray
    ) -> dict[tuple[str, str], np.ndarray]:
        """Return the parts after QK-Clip with the coefficients (layers, heads)."""
        grouped = gamma.reshape(*gamma.shape[:-1], self.kind.groups, -1)
        key = np.sqrt(grouped.min(-1))
        query = (grouped / key[..., None]).reshape(gamma.shape)
        clipped = {}
        for (name, leaf), x in self.parts(params).items():
            factor = query if name == "query" else key
            rest = gamma if name == "query" else np.ones_like(key)
            split = WIDTH - ROTARY if self.is_mla else WIDTH
            is_first = np.arange(x.shape[2]) < split
            by_feature = np.where(is_first, factor[..., None], rest[..., None])
            clipped[name, leaf] = (x.T * by_feature.T).T
        return clipped

    def logits(self, params: Any) -> np.ndarray:
        """Return all logits as (layers, heads, queries, keys).

        Rotary embeddings are omitted, since scaling a head commutes with a rotation.
        """
        x = np.random.default_rng(2).normal(size=(5, MODEL))
        parts = self.parts(params)
        query, key = (
            np.einsum("td,lhnd->lhtn", x, parts[p, "kernel"])
            + parts.get((p, "bias"), np.zeros(1))[..., None, :]
            for p in self.heads
        )
        if self.is_mla:
            shared = np.broadcast_to(
                x @ np.float64(params["shared"]), (*key.shape[:-1], ROTARY)
            )
            key = np.concatenate([key[..., : WIDTH - ROTARY], shared], -1)
        key = np.repeat(key, self.kind.heads // self.kind.groups, 1)
        return np.einsum("lhtn,lhsn->lhts", query, key) / np.sqrt(WIDTH)

    def assert_clipped(
        self, params: Any, out: Any, gamma: np.ndarray, atol: float = 0
    ) -> None:
        """Compare weights and their logits with the formula."""
        parts = self.parts(out)
        for part, wanted in self.clipped(params, gamma).items():
            np.testing.assert_allclose(parts[part], wanted, rtol=1e-6, atol=atol)
        np.testing.assert_array_equal(out["shared"], params["shared"])
        wanted = gamma[..., None, None] * self.logits(params)
        error = np.abs(self.logits(out) - wanted).max((-1, -2))
        room = max(1e-6, 20 * atol) * np.abs(wanted).max((-1, -2))
        assert np.all(error <= room)


def largest_logits(query: Any, key: Any, mask: Any = True) -> np.ndarray:
    """Return the largest attended logit of each head, unscaled."""
    query, key = (np.asarray(x).astype(np.float64) for x in (query, key))
    key = np.repeat(key, query.shape[-2] // key.shape[-2], -2)
    logits = np.einsum("...thd,...shd->...hts", query, key)
    attended = np.where(mask, logits, -np.inf)
    axes = tuple(a for a in range(attended.ndim) if a != attended.ndim - 3)
    return attended.max(axes, initial=-np.inf)


def coefficients(largest: Any, max_logit: Any) -> np.ndarray:
    """Compute algorithm 1 of Kimi K2 in float64; 1 for unusable largest logits."""
    s = np.asarray(largest, np.float64)
    is_usable = np.isfinite(s) & (s > 0)
    ratio = max_logit / np.where(is_usable, s, 1)
    return np.where(is_usable, np.minimum(1, ratio), 1.0)
