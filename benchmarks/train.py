"""Benchmark `train`: a training step of a GPT-2 with clipping and skipping."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import skip, trees
from benchmarks.stepping import Stepping
from benchmarks.timing import Row, race

# Low enough to clip every step, even after the model has learned the few tokens.
LIMIT = 1e-3


class Size(NamedTuple):
    """Hold the size of a GPT-2 and of its batch."""

    letters: int
    width: int
    blocks: int
    window: int
    batch: int


TINY = Size(64, 64, 1, 8, 2)


def init(key: jax.Array, letters: int, width: int, blocks: int, window: int) -> Any:
    """Initialize gains with 1, biases with 0, and weights with variance 1 / width."""
    shapes = trees.gpt2(width, blocks, letters, window)
    flat, treedef = jax.tree.flatten_with_path(shapes, is_leaf=trees.is_shape)
    keys = jax.random.split(key, len(flat))

    def leaf(path: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, path[-1].key == "g", jnp.float32)
        return width**-0.5 * jax.random.normal(key, shape)

    leaves = [leaf(path, shape, k) for (path, shape), k in zip(flat, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def dense(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def attention(p: Any, x: jax.Array, heads: int) -> jax.Array:
    """Compute causal self-attention."""
    batch, window, width = x.shape
    q, k, v = (
        each.reshape(batch, window, heads, width // heads)
        for each in jnp.split(dense(p["c_attn"], x), 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((window, window), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e4), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return dense(p["c_proj"], mixed.reshape(batch, window, width))


def logits(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """Compute the logits of a GPT-2 whose output layer is tied to the embedding."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        x = x + attention(p["attn"], layer_norm(p["ln_1"], x), heads)
        hidden = jax.nn.gelu(dense(p["mlp"]["c_fc"], layer_norm(p["ln_2"], x)))
        x = x + dense(p["mlp"]["c_proj"], hidden)
    return layer_norm(params["ln_f"], x) @ params["wte"].T


def rows(tiny: bool) -> Iterator[Row]:
    size = TINY if tiny else Size(16_384, 384, 6, 128, 2)
    params, tokens = drawn(size)
    gradients = jax.value_and_grad(loss)
    # Each contender holds its own moments, which are in the state of `skip`.
    stepping = Stepping(params, optax.identity(), gradients, tokens)
    contenders = {
        name: stepping.contender(tx) for name, tx in skip.optimizers(LIMIT).items()
    }
    for row in race(contenders, 2 if tiny else 15, against="unclipped"):
        yield {"tokens": size.batch * size.window, **row}


def drawn(size: Size) -> tuple[Any, jax.Array]:
    """Return parameters, and random tokens: a window of inputs and one more target."""
    shape = (size.batch, size.window + 1)
    tokens = np.random.default_rng(1).integers(size.letters, size=shape)
    return init(jax.random.key(0), *size[:-1]), jnp.asarray(tokens)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token; heads have 64 dimensions."""
    output = logits(params, tokens[:, :-1], heads=params["wpe"].shape[1] // 64)
    # A sum over the vocabulary needs more digits than bfloat16 has.
    output = output.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(output, tokens[:, 1:]).mean()
