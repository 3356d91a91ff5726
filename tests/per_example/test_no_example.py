"""Batches of no example, as Poisson sampling draws now and then: zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.per_example import clipped_grad, clipped_sum, norms

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
BATCH = jnp.zeros((0, 3))
PADDING = np.zeros(0, bool)
METHODS = ("vmap", "ghost", "auto")


def loss(params, example):
    return jnp.sum(jnp.tanh(example @ params["w"]) + params["b"])


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_their_sum_is_zeros(run, method, size, padding):
    f = clipped_grad(loss, 1.0, method=method, microbatch_size=size)
    found, info = run(f)(PARAMS, BATCH, padding=padding)
    jax.tree.map(
        np.testing.assert_array_equal, found, jax.tree.map(jnp.zeros_like, PARAMS)
    )
    assert info.values.shape == info.norms.shape == (0,)
    assert f.plan(PARAMS, BATCH).vmap_bytes == 0


@pytest.mark.parametrize("method", METHODS)
def test_they_have_no_norm(method):
    values, found = norms(loss, method=method, over="leaf")(PARAMS, BATCH)
    assert {x.shape for x in (values, *found.values())} == {(0,)}


def test_not_reduced_there_is_none():
    found, _ = clipped_grad(loss, 1.0, reduce="none")(PARAMS, BATCH)
    assert {key: x.shape for key, x in found.items()} == {"w": (0, 3, 2), "b": (0, 2)}


def test_gradients_of_none_add_up_to_zeros():
    over = optclip.groups({"w": "matrix", "b": "vector"})
    grads = {key: jnp.zeros((0, *x.shape)) for key, x in PARAMS.items()}
    found, _ = clipped_sum(grads, 1.0, over=over, padding=PADDING)
    assert {key: x.shape for key, x in found.items()} == {"w": (3, 2), "b": (2,)}
    assert not any(x.any() for x in found.values())
