"""A `jax.custom_vjp` in the loss: ghost clipping equals a loop, or raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optclip
from optclip.per_example import clipped_grad, norms
from tests.support import per_example_oracle

BOUND, BATCH, T, N = 0.05, 4, 3, 32


# It is not linear in the cotangent.
def rule(x):
    return optclip.clip_cotangent(x, 0.1, axis=None)


def looped(step, p, x):
    return lax.scan(lambda h, _: (step(p, h), None), x, None, length=3)[0]


def site(how):
    """A matrix product whose rule changes the cotangents of both operands."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(kept, g):
        _, pull = jax.vjp(jnp.matmul, *kept)
        return jax.tree.map(lambda g: jax.vjp(how, g)[1](g)[0], pull(g))

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return lambda p, x: product(x, p["w"])


# Its derivative is linear: JAX transposes it.
twice = jax.custom_jvp(lambda w, x: x @ w)
twice.defjvp(lambda given, by: (twice(*given), 2 * (given[1] @ by[0])))

# What a layer does with a rule: on its way to the loss, and between a parameter and the
# product with data, where it need not scale with the coefficient.
ON_DATA = {
    "custom_jvp on a weight": lambda how: (
        lambda p, x: how(twice(jnp.sin(p["w"]), x)) * p["b"]
    ),
    "linear solve": lambda how: (
        lambda p, x: jax.lax.custom_linear_solve(
            lambda v: v,
            p["w"] @ x.T,
            lambda _, b: b,
            lambda _, g: jax.vjp(how, g)[1](g)[0],
        )
    ),
    "before": lambda how: lambda p, x: jnp.tanh(how(x)) @ p["w"] * p["b"],
    "scan": lambda how: (
        lambda p, x: looped(lambda p, h: jnp.tanh(how(h) @ p["w"] + p["b"]), p, x)
    ),
    "stopped": lambda how: lambda p, x: x @ p["w"] + how(lax.stop_gradient(p["w"])[0]),
}
ON_WEIGHT = {
    "weight": lambda how: lambda p, x: jnp.tanh(x @ how(p["w"])),
    "weight in jit": lambda how: lambda p, x: x @ jax.jit(lambda w: how(2 * w))(p["w"]),
    "weight in cond": lambda how: (
        lambda p, x: x @ lax.cond(p["b"][0] > 0, how, jnp.sin, p["w"])
    ),
    "weight in scan": lambda how: (
        lambda p, x: looped(lambda p, h: jnp.tanh(h @ how(p["w"])), p, x)
    ),
    "solved weight": lambda how: (
        lambda p, x: (
            x
            @ jax.lax.custom_linear_solve(
                lambda v: v,
                p["w"],
                lambda _, b: b,
                lambda _, g: jax.vjp(how, g)[1](g)[0],
            )
        )
    ),
    "site": site,
    "site in cond": lambda how: (
        lambda p, x: lax.cond(x.sum() > 0, lambda: how(x @ p["w"]), lambda: x @ p["w"])
    ),
    "site in scan": lambda how: lambda p, x: looped(site(how), p, x),
}
PARAMS = {
    "w": (np.random.default_rng(0).normal(size=(N, N)) / 6).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=N).astype(np.float32),
}
EXAMPLES = np.random.default_rng(2).normal(size=(BATCH, T, N)).astype(np.float32)


def loss_of(layer):
    return lambda p, x: jnp.sum(layer(p, x) ** 2)


# The rule on the way from data to the loss is in the random programs.
@pytest.mark.parametrize("place", ON_DATA)
def test_custom_vjp_outside_weights_equals_gradients(place):
    loss = loss_of(ON_DATA[place](rule))
    per_example_oracle.check(loss, PARAMS, EXAMPLES, rtol=1e-5)


@pytest.mark.parametrize("place", ON_WEIGHT)
def test_ghost_custom_vjp_on_weight_raises(place):
    loss = loss_of(ON_WEIGHT[place](rule))
    for make in (norms, lambda loss, **how: clipped_grad(loss, BOUND, **how)):
        with pytest.raises(ValueError, match=r"custom_vjp.*leaf 'w'.*method='vmap'"):
            jax.eval_shape(make(loss, method="ghost"), PARAMS, EXAMPLES)
