"""Two small character models: parameters in float32, computed in bfloat16."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import backprop, trees
from examples import train_char_rnn

COMPUTE = jnp.bfloat16
UNITS = 128
WIDTH = 48
BLOCKS = 2
HEADS = 4


class Model(NamedTuple):
    """A character model and how it is trained.

    The peak learning rate is within a factor of two of the best of 0.001, 0.002, 0.004
    and 0.008 for Adam without clip and spikes, by one seed.
    """

    name: str
    title: str
    init: Callable[[jax.Array, int], Any]  # from a key and the number of letters
    logits: Callable[[Any, jax.Array], jax.Array]
    learning_rate: float
    window: int = 32
    batch: int = 8

    def loss(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats per character."""
        low = jax.tree.map(lambda p: p.astype(COMPUTE), params)
        logits = self.logits(low, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def init_rnn(key: jax.Array, letters: int) -> Any:
    """As in the main job, with fewer units."""
    embed, recur, head = jax.random.split(key, 3)
    scale = UNITS**-0.5
    return {
        "embed": jax.random.normal(embed, (letters, UNITS)),
        "recur": jax.random.normal(recur, (UNITS, UNITS)) * scale / 2,
        "bias": jnp.zeros(UNITS),
        "head": jax.random.normal(head, (UNITS, letters)) * scale,
        "head_bias": jnp.zeros(letters),
    }


def rnn_logits(params: Any, inputs: jax.Array) -> jax.Array:
    """The network of the main job, from an empty hidden state."""
    start = jnp.zeros((len(inputs), UNITS), COMPUTE)
    advance = partial(train_char_rnn.advance, params)
    _, hidden = jax.lax.scan(advance, start, inputs.T)
    return train_char_rnn.logits_of(params, hidden.swapaxes(0, 1))


def init_transformer(key: jax.Array, letters: int) -> Any:
    """Gains 1, biases 0, weights that keep the size of numbers at this width."""
    shapes = trees.gpt2(WIDTH, BLOCKS, letters, TRANSFORMER.window)
    flat, treedef = jax.tree.flatten_with_path(shapes, is_leaf=trees.is_shape)
    keys = jax.random.split(key, len(flat))

    def leaf(path: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, path[-1].key == "g", jnp.float32)
        return WIDTH**-0.5 * jax.random.normal(key, shape)

    leaves = [leaf(path, shape, k) for (path, shape), k in zip(flat, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def transformer_logits(params: Any, inputs: jax.Array) -> jax.Array:
    """A GPT-2 with the embedding tied to the output."""
    x = params["wte"][inputs] + params["wpe"][: inputs.shape[1]]
    for p in params["blocks"]:
        x = x + backprop.attention(p["attn"], backprop.normed(p["ln_1"], x), HEADS)
        x = x + feed_forward(p["mlp"], backprop.normed(p["ln_2"], x))
    return backprop.normed(params["ln_f"], x) @ params["wte"].T


def feed_forward(p: Any, x: jax.Array) -> jax.Array:
    """The second half of a block."""
    return backprop.dense(p["c_proj"], jax.nn.gelu(backprop.dense(p["c_fc"], x)))


RNN = Model("rnn", f"recurrent network of {UNITS} units", init_rnn, rnn_logits, 4e-3)
TRANSFORMER = Model(
    "transformer", f"transformer of {BLOCKS} blocks, width {WIDTH}", init_transformer,
    transformer_logits, 4e-3,
)  # fmt: skip
MODELS = (RNN, TRANSFORMER)
