"""Question `train`: a real training step of a GPT-2, clipped beside unclipped."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import exact, step, trees
from benchmarks.stepping import Stepping
from benchmarks.timing import Row, race

# So low that every step is clipped, also when these few tokens are learnt.
LIMIT = 1e-3
# The gradients in the step and alone are compiled, and so rounded, differently.
SLACK = {"float32": 1e-3, "bfloat16": 0.2}


class Model(NamedTuple):
    """The sizes of a GPT-2 and of its batch."""

    width: int
    blocks: int
    vocabulary: int
    window: int
    batch: int

    @property
    def heads(self) -> int:
        """As in GPT-2, 64 numbers each."""
        return max(1, self.width // 64)

    def parameters(self, dtype: str) -> Any:
        """Parameters as at the start of training: gains 1, biases 0, weights small."""
        shapes = trees.gpt2(self.width, self.blocks, self.vocabulary, self.window)
        return jax.tree_util.tree_map_with_path(_initial, trees.numbers(shapes, dtype))


def _initial(path: Any, x: np.ndarray) -> np.ndarray:
    """One leaf of standard normal numbers, made into a parameter."""
    if x.ndim == 2:
        return (0.02 * x.astype(np.float32)).astype(x.dtype)
    return np.full_like(x, path[-1].key == "g")


def normed(p: Any, x: jax.Array) -> jax.Array:
    """Layer normalization."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def dense(p: Any, x: jax.Array) -> jax.Array:
    """An affine map."""
    return x @ p["w"] + p["b"]


def attention(p: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention."""
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
    """A GPT-2 with the embedding tied to the output."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        x = x + attention(p["attn"], normed(p["ln_1"], x), heads)
        hidden = jax.nn.gelu(dense(p["mlp"]["c_fc"], normed(p["ln_2"], x)))
        x = x + dense(p["mlp"]["c_proj"], hidden)
    return normed(params["ln_f"], x) @ params["wte"].T


def loss(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """The cross-entropy of each next token."""
    found = logits(params, tokens[:, :-1], heads).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()


def rows(tiny: bool) -> Iterator[Row]:
    """The real step in float32; on a GPU also in bfloat16, and larger."""
    on_gpu = jax.default_backend() == "gpu"
    if tiny:
        model = Model(64, 1, 512, 32, 2)
    elif on_gpu:
        model = Model(768, 12, 50257, 1024, 8)
    else:
        model = Model(384, 6, 16384, 128, 2)
    for dtype in ("float32", "bfloat16") if on_gpu else ("float32",):
        for row in _raced(model, dtype, 2 if tiny else 15):
            yield {"tokens": model.batch * model.window, "dtype": dtype, **row}


def _raced(model: Model, dtype: str, rounds: int) -> list[Row]:
    params = jax.device_put(model.parameters(dtype))
    shape = (model.batch, model.window + 1)
    tokens = np.random.default_rng(1).integers(model.vocabulary, size=shape)

    def gradients(params: Any, tokens: jax.Array) -> Any:
        return jax.grad(loss)(params, tokens, model.heads)

    stepping = Stepping(
        params, optax.adamw(1e-4), gradients, jnp.asarray(tokens), slack=SLACK[dtype]
    )
    clips: step.Clips = {"unclipped": (optax.identity(), exact.unclipped)}
    clips |= step.by_global_norm(LIMIT)
    contenders = {name: stepping.contender(*each) for name, each in clips.items()}
    return race(contenders, rounds, against="unclipped")
