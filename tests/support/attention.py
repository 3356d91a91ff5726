"""Attention in NumPy float64: projections in several layouts, and their logits."""

import dataclasses
from typing import Any

import numpy as np

import optclip

MODEL, WIDTH, ROTARY, VALUES = 12, 8, 4, 6
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a library keeps kernels `(model, heads, n)` and biases `(heads, n)`."""

    id: str
    options: dict[str, Any]
    biased: bool = True

    def pack(self, x: np.ndarray) -> np.ndarray:
        if self.id == "haiku":
            return x.reshape(*x.shape[:-2], -1)
        if self.id == "equinox":
            flat = x.reshape(*x.shape[:-2], -1)
            return np.moveaxis(flat, -1, 0)
        if self.id == "maxtext":
            return x[:, None]
        return x[None] if self.id == "scanned" else x

    def unpack(self, leaf: Any, heads: int) -> np.ndarray:
        x = np.asarray(leaf).astype(np.float64)
        if self.id == "equinox":
            x = np.moveaxis(x, 0, -1)
        if self.id in ("haiku", "equinox"):
            return x.reshape(*x.shape[:-1], heads, -1)
        if self.id == "maxtext":
            return x[:, 0]
        return x[0] if self.id == "scanned" else x

    @property
    def stacks(self) -> bool:
        return "stacked" in self.options


LAYOUTS = [
    Layout("flax", {}),
    Layout("haiku", {"axis": -1, "head_dim": WIDTH}),
    Layout("equinox", {"axis": 0, "head_dim": WIDTH}),
    Layout("scanned", {"stacked": 0}),
    Layout("maxtext", {"stacked": 1}, biased=False),
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of attention by its numbers of heads."""

    id: str
    heads: int
    groups: int


KINDS = [Kind("mha", 4, 4), Kind("gqa", 6, 2), Kind("mqa", 4, 1), Kind("mla", 4, 4)]


@dataclasses.dataclass(frozen=True)
class Model:
    """One attention layer: its leaves, and its logits from them."""

    layout: Layout
    kind: Kind

    @property
    def is_mla(self) -> bool:
        return self.kind.id == "mla"

    def params(self, dtype: Any = np.float32) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        more = VALUES if self.is_mla else 0
        shapes = {
            "query": (self.kind.heads, WIDTH),
            "key": (self.kind.groups, WIDTH - (ROTARY if self.is_mla else 0) + more),
        }
        found = {}
        for name, shape in shapes.items():
            found[name] = {"kernel": rng.normal(size=(MODEL, *shape))}
            if self.layout.biased:
                found[name]["bias"] = rng.normal(size=shape)
            found[name] = {k: self.layout.pack(x) for k, x in found[name].items()}
        found["shared"] = rng.normal(size=(MODEL, ROTARY))
        return {
            k: {n: x.astype(dtype) for n, x in v.items()}
            if isinstance(v, dict)
            else v.astype(dtype)
            for k, v in found.items()
        }

    def layers(self) -> dict[str, optclip.Heads]:
        names = ["kernel", "bias"] if self.layout.biased else ["kernel"]
        query, key = (tuple(f"{p}/{n}" for n in names) for p in ("query", "key"))
        rope = ROTARY if self.is_mla else 0
        return {"attn": optclip.Heads(query, key, rope=rope, **self.layout.options)}

    def parts(self, params: Any) -> dict[str, dict[str, np.ndarray]]:
        heads = {"query": self.kind.heads, "key": self.kind.groups}
        return {
            name: {k: self.layout.unpack(x, n) for k, x in params[name].items()}
            for name, n in heads.items()
        }

    def logits(self, params: Any) -> np.ndarray:
        """Each logit, `(heads, queries, keys)`, with rotary embeddings."""
        x = np.random.default_rng(2).normal(size=(5, MODEL))
        parts = self.parts(params)
        query, key = (
            np.einsum("td,dhn->thn", x, parts[p]["kernel"]) + parts[p].get("bias", 0)
            for p in ("query", "key")
        )
        ways = self.kind.heads // self.kind.groups
        if self.is_mla:
            width = WIDTH - ROTARY
            shared = rotated((x @ np.float64(params["shared"]))[:, None])
            key = np.concatenate(
                [key[..., :width], np.repeat(shared, self.kind.heads, 1)], -1
            )
            query = np.concatenate(
                [query[..., :width], rotated(query[..., width:])], -1
            )
        else:
            query, key = rotated(query), np.repeat(rotated(key), ways, 1)
        return np.einsum("thn,shn->hts", query, key) / np.sqrt(WIDTH)


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotary position embedding of `(positions, heads, n)`."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * 10.0 ** -np.arange(half)
    a, b = x[..., :half], x[..., half:]
    turned = [
        a * np.cos(angle) - b * np.sin(angle),
        a * np.sin(angle) + b * np.cos(angle),
    ]
    return np.concatenate(turned, -1)


def coefficients(largest: Any, max_logit: Any) -> np.ndarray:
    """Algorithm 1 of Kimi K2, of logits above 0."""
    s = np.asarray(largest, np.float64)
    usable = np.isfinite(s) & (s > 0)
    return np.where(usable, np.minimum(1, max_logit / np.where(usable, s, 1)), 1.0)
