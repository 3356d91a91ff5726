"""Part `backprop`: a real train step of a small GPT-2, clipped against unclipped."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import stepping, trees
from benchmarks.cases import Case, Options, Row
from benchmarks.timing import race


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


def loss(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """The cross-entropy of each next token, with the embedding tied to the output."""
    x = params["wte"][tokens[:, :-1]] + params["wpe"][: tokens.shape[1] - 1]
    for p in params["blocks"]:
        x = x + attention(p["attn"], normed(p["ln_1"], x), heads)
        hidden = jax.nn.gelu(dense(p["mlp"]["c_fc"], normed(p["ln_2"], x)))
        x = x + dense(p["mlp"]["c_proj"], hidden)
    logits = normed(params["ln_f"], x) @ params["wte"].T
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    ).mean()


def cases(options: Options) -> Iterator[Case]:
    """The real step in float32; on a GPU also in bfloat16, and larger."""
    if options.small:
        model = Model(64, 1, 512, 32, 2)
    elif options.gpu:
        model = Model(768, 12, 50257, 1024, 8)
    else:
        model = Model(384, 6, 16384, 128, 2)
    count = sum(
        math.prod(s)
        for s in trees.leaves(
            trees.gpt2(model.width, model.blocks, model.vocabulary, model.window)
        )
    )
    title = f"GPT-2 of {count / 1e6:.1f}M, {model.batch} x {model.window} tokens"
    for dtype in ("f32", "bf16") if options.gpu else ("f32",):
        yield Case(
            {"what": "backprop", "dtype": dtype}, _case(model, dtype, options), title
        )


def _case(model: Model, dtype: str, options: Options) -> Callable[[], dict[str, Row]]:
    """How to run the race."""

    def run() -> dict[str, Row]:
        params = jax.device_put(model.parameters(dtype))
        shape = (model.batch, model.window + 1)
        tokens = jnp.asarray(
            np.random.default_rng(1).integers(model.vocabulary, size=shape)
        )

        def gradients(params: Any, tokens: jax.Array) -> Any:
            return jax.grad(loss)(params, tokens, model.heads)

        # The gradients in the step and alone are compiled, and so rounded, differently.
        slack = {"f32": 1e-3, "bf16": 0.2}[dtype]
        shared = stepping.Shared(
            params, optax.adamw(1e-4), gradients, tokens, slack=slack
        )
        # So low that every step is clipped, also when these few tokens are learnt.
        clips = stepping.transformations(1e-3)
        runners = {name: shared.contender(name, clip) for name, clip in clips.items()}
        return race(runners, options.rounds)

    return run
