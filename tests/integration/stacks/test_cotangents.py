"""Clip cotangents in a step of Flax NNX and in differential equations."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.ode import odeint

import optclip
from tests.integration.stacks import page

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


# In the vector field of a differential equation.


def test_clip_cotangent_in_vector_field_acts_except_in_backsolve():
    """If the second changes, the page's limit no longer holds."""
    norms = page.run("ODE solvers")["norms"]
    free, clipped = norms["RecursiveCheckpointAdjoint"]
    assert clipped < 0.8 * free
    assert norms["BacksolveAdjoint"] == pytest.approx([free, free], rel=1e-2)


def test_clip_cotangent_in_odeint_clips_cotangents_of_the_state():
    """Cotangents of single evaluations, as in diffrax, are below the threshold."""

    def loss(w, c):
        def field(y, t, w):
            return 2 * jnp.tanh(w @ optclip.clip_cotangent(y, c))

        times = jnp.array([0.0, 2.0])
        return jnp.sum(odeint(field, jnp.array([1.0, 0.5]), times, w)[-1] ** 2)

    w = jnp.array([[2.0, 1.0], [-1.0, 2.0]])
    free, cut = (jnp.linalg.norm(jax.grad(loss)(w, c)) for c in (jnp.inf, 10.0))
    assert cut < 0.8 * free
