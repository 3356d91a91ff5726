"""Clip cotangents between two layers of library models."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optclip

X = jax.random.normal(jax.random.key(1), (5, 4))
C = 0.1


class Linen(nn.Module):
    clip: object

    @nn.compact
    def __call__(self, x):
        h = self.clip(nn.Dense(6))(x)
        return nn.Dense(3)(jnp.tanh(h))


def linen(clip):
    model = Linen(clip)
    return model.apply, model.init(jax.random.key(0), X)


def of_nnx(clip):
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
    graph, params = nnx.split(layers)

    def apply(params, x):
        first, last = nnx.merge(graph, params)
        return last(jnp.tanh(clip(first)(x)))

    return apply, params


def haiku(clip):
    def forward(x):
        return hk.Linear(3)(jnp.tanh(clip(hk.Linear(6))(x)))

    model = hk.without_apply_rng(hk.transform(forward))
    return model.apply, model.init(jax.random.key(0), X)


def clipped(layer):
    return lambda x: optclip.clip_cotangent(layer(x), C)


@pytest.mark.parametrize("library", [linen, of_nnx, haiku])
def test_clip_cotangent_of_layer_shrinks_gradient_only(library):
    """Parameters and outputs are unchanged."""
    runs = []
    for clip in (lambda layer: layer, clipped):
        apply, params = library(clip)

        def loss(params, apply=apply):
            return jnp.sum(apply(params, X) ** 2)

        runs.append((params, *jax.jit(jax.value_and_grad(loss))(params)))
    (one, value, free), (other, again, cut) = runs
    jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    norms = [optclip.functional.global_norm(tree) for tree in (free, cut)]
    assert norms[1] < norms[0]


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
