"""Compute ghost norms of unchanged library models."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support import per_example_oracle

BATCH, T, WIDTH, WORDS, LAYERS = 4, 6, 16, 30, 2


def drawn(*shape, most=None):
    rng = np.random.default_rng(0)
    if most:
        return jnp.asarray(rng.integers(0, most, (BATCH, *shape)))
    return jnp.asarray(rng.normal(size=(BATCH, *shape)), jnp.float32)


def check(loss, params, examples, formulas):
    """Compare with gradients; at least `formulas` leaves have a formula.

    The gradient of the bias of keys is 0 up to rounding.
    """
    per_example_oracle.check(loss, params, examples, rtol=2e-6, run=jax.jit, least=0.1)
    kinds = jax.tree.leaves(per_example_oracle.kinds_of(loss, params, examples))
    assert sum(kind == "formula" for kind in kinds) >= formulas


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        z = nn.LayerNorm(dtype=None)(h)
        h = h + nn.MultiHeadDotProductAttention(num_heads=2)(z)
        return h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(h))), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(WORDS, WIDTH)
        h = embed(ids)
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        h, _ = layers()(h, None)
        return embed.attend(h)


def test_ghost_norms_of_flax_linen_transformer():
    model, ids = Transformer(), drawn(T, most=WORDS)
    params = model.init(jax.random.key(0), ids[0])

    def loss(p, ids):
        return jnp.mean(jax.nn.logsumexp(model.apply(p, ids), axis=-1))

    check(loss, params, ids, 6)


def test_ghost_norms_of_flax_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)
            self.out = nnx.Linear(WIDTH, WORDS, rngs=rngs)

        def __call__(self, ids):
            h = self.embed(ids)
            h = h + self.attend(self.norm(h))
            return self.out(jnp.tanh(h + self.lora(h)))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss(p, ids):
        model = nnx.merge(graph, p, rest)
        return jnp.mean(jax.nn.logsumexp(model(ids), axis=-1))

    def loss_of_lists(leaves, ids):
        return loss(jax.tree.unflatten(jax.tree.structure(params), leaves), ids)

    check(loss_of_lists, jax.tree.leaves(params), drawn(T, most=WORDS), 6)


def test_ghost_norms_of_equinox():
    key = jax.random.key(0)
    model = (
        eqx.nn.MLP(8, WIDTH, WIDTH, 2, key=key),
        eqx.nn.GRUCell(WIDTH, WIDTH, key=key),
        eqx.nn.LayerNorm(WIDTH),
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(p, x):
        mlp, cell, norm = eqx.combine(p, static)
        h = jax.vmap(lambda x: norm(mlp(x)))(x)

        def step(state, x):
            return cell(x, state), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(WIDTH), h)[0] ** 2)

    check(loss, params, drawn(T, 8), 5)


def test_ghost_norms_of_haiku():
    def apply(x):
        h = hk.Sequential([hk.Conv1D(WIDTH, 3), jax.nn.relu, hk.Linear(WIDTH)])(x)
        h, _ = hk.dynamic_unroll(hk.LSTM(WIDTH), h, hk.LSTM(WIDTH).initial_state(None))
        return jnp.sum(hk.LayerNorm(-1, True, True)(h) ** 3)

    model, x = hk.without_apply_rng(hk.transform(apply)), drawn(T, 8)
    params = model.init(jax.random.key(0), x[0])
    check(model.apply, params, x, 2)
