"""Compute ghost norms of an unchanged model: a scanned transformer of Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import per_example_oracle

BATCH, T, WIDTH, WORDS, LAYERS = 4, 6, 16, 30, 2


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
    model = Transformer()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, (BATCH, T)))
    params = model.init(jax.random.key(0), ids[0])

    def loss(p, ids):
        return jnp.mean(jax.nn.logsumexp(model.apply(p, ids), axis=-1))

    # The gradient of the bias of keys is 0 up to rounding.
    per_example_oracle.check(loss, params, ids, rtol=2e-6, run=jax.jit, least=0.1)
    kinds = jax.tree.leaves(per_example_oracle.kinds_of(loss, params, ids))
    assert kinds.count("formula") >= 6
