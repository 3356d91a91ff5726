"""The workloads: trees of shapes, and the numbers that fill them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def gpt2(width: int, blocks: int, vocabulary: int, positions: int) -> Tree:
    """The parameters of GPT-2; (768, 12, 50257, 1024) are the 148 leaves of 124M."""

    def affine(rows: int, columns: int) -> Tree:
        return {"w": (rows, columns), "b": (columns,)}

    d, norm = width, {"g": (width,), "b": (width,)}
    attention = {"c_attn": affine(d, 3 * d), "c_proj": affine(d, d)}
    mlp = {"c_fc": affine(d, 4 * d), "c_proj": affine(4 * d, d)}
    block = {"ln_1": norm, "attn": attention, "ln_2": norm, "mlp": mlp}
    embeddings = {"wte": (vocabulary, d), "wpe": (positions, d)}
    return {**embeddings, "blocks": [block] * blocks, "ln_f": norm}


def llama(width: int, blocks: int, hidden: int, vocabulary: int) -> Tree:
    """The parameters of a Llama; (4096, 32, 11008, 32000) are the 291 leaves of 7B."""
    up, norm = (width, hidden), (width,)
    block = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    block |= {"w1": up, "w2": up[::-1], "w3": up, "norm_1": norm, "norm_2": norm}
    head = {"embed": (vocabulary, width), "head": (width, vocabulary), "norm": norm}
    return {**head, "blocks": [block] * blocks}


def small_leaves(count: int) -> Tree:
    """Leaves of 64; a list, because thousands of keys cost a sort in every call."""
    return [(64,)] * count


def workloads(tiny: bool) -> dict[str, Tree]:
    """The trees that run: of two models, and of many leaves; or tiny ones like them."""
    if tiny:
        return {
            "gpt2": gpt2(32, 0, 512, 64),
            "llama": llama(16, 1, 24, 64),
            "small": small_leaves(8),
        }
    return {
        "gpt2": gpt2(768, 12, 50_257, 1024),
        # A sixteenth as wide as that of 7B: as many leaves, in the memory of a desktop.
        "llama": llama(256, 32, 688, 2_000),
        "small": small_leaves(2_000),
    }


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def map_shapes(make: Callable[[tuple[int, ...]], Any], shapes: Tree) -> Tree:
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def typed(shapes: Tree, dtype: str) -> Tree:
    return map_shapes(lambda s: jax.ShapeDtypeStruct(s, DTYPES[dtype]), shapes)


def numbers(shapes: Tree, dtype: str) -> Tree:
    """NumPy arrays of standard normal numbers, the same in every run."""
    rng = np.random.default_rng(0)

    def filled(shape: tuple[int, ...]) -> np.ndarray:
        array = rng.standard_normal(shape, np.float32)
        return array.astype(DTYPES[dtype], copy=False)

    return map_shapes(filled, shapes)


def nbytes(tree: Tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def exact_norm(arrays: Sequence[Any]) -> float:
    """The L2 norm in float64, whatever the dtypes."""
    flat = (np.asarray(x).reshape(-1).astype(np.float64) for x in arrays)
    return float(np.sqrt(sum(np.vdot(x, x) for x in flat)))
