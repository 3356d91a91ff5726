"""Cotangents clipped inside models of the libraries, between two of their layers."""

import equinox as eqx
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


class LinenScan(nn.Module):
    clip: object

    @nn.compact
    def __call__(self, x):
        def step(cell, carry, x):
            carry, y = cell(carry, x)
            return self.clip(lambda: carry)(), y

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        cell = nn.GRUCell(4)
        carry = cell.initialize_carry(jax.random.key(0), (4,))
        return scan(cell, carry, x)[1]


class Nnx(nnx.Module):
    def __init__(self, clip):
        rngs = nnx.Rngs(0)
        self.clip, self.first, self.last = (
            clip, nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        )  # fmt: skip

    def __call__(self, x):
        return self.last(jnp.tanh(self.clip(self.first)(x)))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    clip: object = eqx.field(static=True)

    def __init__(self, clip):
        self.first = eqx.nn.Linear(4, 6, key=jax.random.key(0))
        self.last = eqx.nn.Linear(6, 3, key=jax.random.key(2))
        self.clip = clip

    def __call__(self, x):
        return self.last(jnp.tanh(self.clip(self.first)(x)))


def linen(clip, kind=Linen):
    model = kind(clip)
    return model.apply, model.init(jax.random.key(0), X)


def of_nnx(clip):
    graph, params = nnx.split(Nnx(clip))
    return lambda params, x: nnx.merge(graph, params)(x), params


def equinox(clip):
    params, static = eqx.partition(Equinox(clip), eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params


def haiku(clip):
    def forward(x):
        return hk.Linear(3)(jnp.tanh(clip(hk.Linear(6))(x)))

    model = hk.without_apply_rng(hk.transform(forward))
    return model.apply, model.init(jax.random.key(0), X)


MODELS = {
    "linen": linen,
    "linen scan": lambda clip: linen(clip, LinenScan),
    "nnx": of_nnx,
    "equinox": equinox,
    "haiku": haiku,
}


def clipped(layer):
    return optclip.with_clipped_cotangent(layer, C)


def plain(layer):
    return layer


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_wrapped_where_it_is_called(name):
    """Parameters, outputs and the last layer's gradient as ever; the others' smaller."""
    found = {}
    for clip in (plain, clipped):
        apply, params = MODELS[name](clip)

        def loss(params, apply=apply):
            return jnp.sum(apply(params, X) ** 2)

        found[clip] = params, loss(params), jax.jit(jax.grad(loss))(params)
    (one, value, free), (other, again, cut) = found.values()
    # By leaf: a module of Equinox has its clip in its structure.
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    norms = [optclip.functional.global_norm(tree) for tree in (free, cut)]
    assert norms[1] < norms[0]


def test_by_hand_in_a_model_of_two_layers():
    apply, params = linen(clipped)
    grads = jax.grad(lambda params: jnp.sum(apply(params, X) ** 2))(params)["params"]
    w, b = (
        {k: np.asarray(v, np.float64) for k, v in params["params"][name].items()}
        for name in ("Dense_0", "Dense_1")
    )
    x = np.asarray(X, np.float64)
    h = np.tanh(x @ w["kernel"] + w["bias"])
    g = 2 * (h @ b["kernel"] + b["bias"]) @ b["kernel"].T * (1 - h**2)
    g *= np.minimum(1, C / np.linalg.norm(g, axis=1, keepdims=True))
    np.testing.assert_allclose(
        grads["Dense_0"]["kernel"], x.T @ g, rtol=1e-4, atol=1e-6
    )


def test_statistics_in_a_training_step_of_nnx():
    model = Nnx(plain)

    @nnx.jit
    def step(model, probe):
        def loss(model, probe):
            h = model.first(X)
            h, _ = optclip.clip_cotangent(h, C, probe=probe)
            return jnp.sum(model.last(jnp.tanh(h)) ** 2)

        grads, seen = nnx.grad(loss, argnums=(0, 1))(model, probe)
        return grads, optclip.metrics(seen)

    _, found = step(model, optclip.cotangent_probe())
    assert 0 < found["cotangent/fraction"] <= 1
    assert found["cotangent/largest_norm"] > C
