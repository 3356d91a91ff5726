"""Compute ghost norms of unchanged models: a scanned transformer and a recurrence."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

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
