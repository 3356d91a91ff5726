"""Record the norms of cotangents in a step of Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

import optclip

X = jax.random.normal(jax.random.key(1), (5, 4))
C = 0.1


def test_clip_cotangent_probe_in_nnx_step_records_norms():
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(layer, probe):
        def loss(layer, probe):
            h, _ = optclip.clip_cotangent(layer(X), C, probe=probe)
            return jnp.sum(h**2)

        grads, records = nnx.grad(loss, argnums=(0, 1))(layer, probe)
        return grads, optclip.metrics(records)

    _, metrics = step(layer, optclip.cotangent_probe())
    assert 0 < metrics["cotangent/fraction"] <= 1
    assert metrics["cotangent/largest_norm"] > C
