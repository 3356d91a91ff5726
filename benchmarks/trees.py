"""The workloads: trees of shapes and dtypes, and the numbers that fill them.

All numbers are standard normal and the same in every run. Lists stand for the trees of
many leaves, because a dict of thousands of keys costs every contender a sort per call.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

DTYPES: dict[str, tuple[Any, ...]] = {
    "f32": (jnp.float32,),
    "bf16": (jnp.bfloat16,),
    "f16": (jnp.float16,),
    "mixed": (jnp.float32, jnp.bfloat16, jnp.float16),
}
# Powers of two and odd sizes, vectors to kernels of four axes, 8 to 2,048 elements.
SMALL_SHAPES: tuple[tuple[int, ...], ...] = (
    (8,), (16,), (33,), (64,), (100,), (128,), (256,), (384,), (1024,), (2048,),
    (4, 4), (8, 8), (16, 16), (30, 50), (32, 32), (64, 16), (5, 7), (1, 96),
    (3, 3, 16), (2, 64, 4), (12, 1, 64), (3, 3, 8, 8), (2, 2, 16, 32), (1, 1, 64, 8),
)  # fmt: skip


class Workload(NamedTuple):
    """Shapes by name, before a dtype is chosen."""

    name: str
    title: str
    shapes: Tree
    many: bool  # so many leaves that XLA compiles the plain formulas for seconds
    long: bool = False  # even minutes: these are run only when asked for


def gpt2(width: int, blocks: int, vocabulary: int, positions: int) -> Tree:
    """The parameters of GPT-2; (768, 12, 50257, 1024) are the 148 leaves of 124M."""

    def affine(rows: int, columns: int) -> Tree:
        return {"w": (rows, columns), "b": (columns,)}

    def norm() -> Tree:
        return {"g": (width,), "b": (width,)}

    def block() -> Tree:
        return {
            "ln_1": norm(),
            "attn": {
                "c_attn": affine(width, 3 * width),
                "c_proj": affine(width, width),
            },
            "ln_2": norm(),
            "mlp": {
                "c_fc": affine(width, 4 * width),
                "c_proj": affine(4 * width, width),
            },
        }

    return {
        "wte": (vocabulary, width),
        "wpe": (positions, width),
        "blocks": [block() for _ in range(blocks)],
        "ln_f": norm(),
    }


def llama(width: int, blocks: int, hidden: int, vocabulary: int) -> Tree:
    """The parameters of a Llama; (4096, 32, 11008, 32000) are the 291 leaves of 7B."""
    square, up = (width, width), (width, hidden)

    def block() -> Tree:
        attention = dict.fromkeys(("wq", "wk", "wv", "wo"), square)
        feed_forward = {"w1": up, "w2": up[::-1], "w3": up}
        return attention | feed_forward | {"norm_1": (width,), "norm_2": (width,)}

    head = {"embed": (vocabulary, width), "head": (width, vocabulary), "norm": (width,)}
    return head | {"blocks": [block() for _ in range(blocks)]}


def equal(leaves: int) -> Tree:
    """Leaves of 64 elements."""
    return [(64,)] * leaves


def assorted(leaves: int) -> Tree:
    """Small leaves of several sizes and ranks, in no order."""
    chosen = np.random.default_rng(0).integers(len(SMALL_SHAPES), size=leaves)
    return [SMALL_SHAPES[i] for i in chosen]


def distinct(leaves: int) -> Tree:
    """Small leaves, no two of one size."""
    return [(24 + i,) for i in range(leaves)]


def workloads(small: bool) -> dict[str, Workload]:
    """The five trees, or tiny ones of the same kinds."""
    if small:
        named, n = gpt2(32, 1, 512, 64), 24
        one, distinct_leaves = (1 << 16,), 12
    else:
        named, n = gpt2(768, 12, 50257, 1024), 2000
        one, distinct_leaves = (124_439_808,), 1000
    found = (
        Workload("gpt2", f"GPT-2, {len(leaves(named))} leaves", named, False),
        Workload("one", f"one array of {one[0]:,}", [one], False),
        Workload("equal", f"{n:,} leaves of 64", equal(n), True),
        Workload(
            "distinct", f"{distinct_leaves:,} distinct sizes", distinct(distinct_leaves),
            True,
        ),
        Workload("assorted", f"{2 * n:,} small leaves", assorted(2 * n), True, True),
    )  # fmt: skip
    return {each.name: each for each in found}


def is_shape(node: Any) -> bool:
    """Whether a node of a tree of shapes is a leaf of it."""
    return isinstance(node, tuple)


def leaves(shapes: Tree) -> list[tuple[int, ...]]:
    """The shapes in order."""
    return jax.tree.leaves(shapes, is_leaf=is_shape)


def map_shapes(make: Callable[[tuple[int, ...]], Any], shapes: Tree) -> Tree:
    """A tree with one thing made of each shape."""
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def typed(shapes: Tree, dtype: str) -> Tree:
    """The shapes with their dtypes, taken in turn where they are mixed."""
    turn = cycle(DTYPES[dtype])
    return map_shapes(lambda shape: jax.ShapeDtypeStruct(shape, next(turn)), shapes)


def numbers(shapes: Tree, dtype: str, seed: int = 0) -> Tree:
    """NumPy arrays of standard normal numbers."""
    rng, turn = np.random.default_rng(seed), cycle(DTYPES[dtype])
    return map_shapes(
        lambda shape: rng.standard_normal(shape, np.float32).astype(
            next(turn), copy=False
        ),
        shapes,
    )


def nbytes(tree: Tree) -> int:
    """The bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def exact_norm(arrays: Sequence[Any]) -> float:
    """The L2 norm in float64, whatever the dtypes."""
    return float(np.sqrt(sum(np.vdot(part, part) for part in _in_float64(arrays))))


def _in_float64(arrays: Sequence[Any]) -> Iterator[np.ndarray]:
    """All elements as float64, a few million at a time to spare memory."""
    for array in arrays:
        flat = np.asarray(array).reshape(-1)
        for start in range(0, flat.size, 1 << 22):
            yield flat[start : start + (1 << 22)].astype(np.float64)
