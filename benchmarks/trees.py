"""Build the workloads: trees of shapes, filled with random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def gpt2(width: int, blocks: int, vocabulary: int, positions: int) -> Tree:
    """Return the shapes of GPT-2; (768, 12, 50257, 1024) is GPT-2 124M, 148 leaves."""

    def affine(rows: int, columns: int) -> Tree:
        return {"w": (rows, columns), "b": (columns,)}

    d, norm = width, {"g": (width,), "b": (width,)}
    attention = {"c_attn": affine(d, 3 * d), "c_proj": affine(d, d)}
    mlp = {"c_fc": affine(d, 4 * d), "c_proj": affine(4 * d, d)}
    block = {"ln_1": norm, "attn": attention, "ln_2": norm, "mlp": mlp}
    embeddings = {"wte": (vocabulary, d), "wpe": (positions, d)}
    return {**embeddings, "blocks": [block] * blocks, "ln_f": norm}


def llama(width: int, blocks: int, hidden: int, vocabulary: int) -> Tree:
    """Return the shapes of Llama; (4096, 32, 11008, 32000) is Llama 7B, 291 leaves."""
    up, norm = (width, hidden), (width,)
    block = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    block |= {"w1": up, "w2": up[::-1], "w3": up, "norm_1": norm, "norm_2": norm}
    head = {"embed": (vocabulary, width), "head": (width, vocabulary), "norm": norm}
    return {**head, "blocks": [block] * blocks}


def small_leaves(count: int) -> Tree:
    """Return leaves of 64; in a list, since JAX sorts a dict's keys in every call."""
    return [(64,)] * count


def workloads(tiny: bool) -> dict[str, Tree]:
    """Return the trees of two models and one of many small leaves."""
    if tiny:
        return {
            "gpt2": gpt2(32, 0, 512, 64),
            "llama": llama(16, 1, 24, 64),
            "small": small_leaves(8),
        }
    return {
        "gpt2": gpt2(768, 12, 50_257, 1024),
        # Llama 7B at 1/16 of its width: as many leaves, but fits into a desktop's
        # memory.
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
    """Return NumPy arrays of standard normal numbers, the same in every run."""
    rng = np.random.default_rng(0)

    def filled(shape: tuple[int, ...]) -> np.ndarray:
        array = rng.standard_normal(shape, np.float32)
        return array.astype(DTYPES[dtype], copy=False)

    return map_shapes(filled, shapes)


def exact_norm(arrays: Sequence[Any]) -> float:
    """Return the L2 norm, computed in float64."""
    flat = (np.asarray(x).reshape(-1).astype(np.float64) for x in arrays)
    return float(np.sqrt(sum(np.vdot(x, x) for x in flat)))
