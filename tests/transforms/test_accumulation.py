"""The order: accumulate, unscale, clip, update. As the page on being at scale says."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers

MAX_NORM = 0.5
MICRO = 4


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(MICRO, 8, 3)).astype(np.float32)
    return inputs, (inputs @ np.float32([3.0, -2.0, 5.0])).astype(np.float32)


PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def loss_of(params, batch):
    inputs, targets = batch
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)


gradient_of = helpers.quick_jit(jax.grad(loss_of))


def mean_gradient(data):
    return gradient_of(
        PARAMS, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    )


def gradients(data):
    """That of each microbatch."""
    for i in range(MICRO):
        yield gradient_of(PARAMS, jax.tree.map(lambda x, i=i: x[i], data))


def clipped_step(gradient):
    """What a step with the gradient of the whole batch does, in NumPy float64."""
    wide = helpers.as_float64(gradient)
    norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(wide)))
    assert norm > MAX_NORM
    return jax.tree.map(lambda x: -x * MAX_NORM / norm, wide)


def clipped_sgd():
    return optax.chain(optclip.clip_by_global_norm(MAX_NORM), optax.sgd(1.0))


assert_step = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)


def test_before_multi_steps_each_microbatch_is_clipped(data):
    """Which is another method, and shrinks what the mean would not."""
    outside = optax.chain(
        optclip.clip_by_global_norm(MAX_NORM),
        optax.MultiSteps(
            optax.sgd(1.0), every_k_schedule=MICRO
        ).gradient_transformation(),
    )
    state = outside.init(PARAMS)
    update = helpers.quick_jit(outside.update)
    for grads in gradients(data):
        found, state = update(grads, state, PARAMS)
    assert helpers.differs(found, clipped_step(mean_gradient(data)))
    assert float(optax.tree.norm(found)) < MAX_NORM * 0.999


def test_microbatches_in_a_scan(data):
    """Average first, update once."""
    tx = clipped_sgd()

    @helpers.quick_jit
    def step(params, state, data):
        def add(total, batch):
            grads = jax.grad(loss_of)(params, batch)
            return jax.tree.map(jnp.add, total, grads), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), data)
        return tx.update(jax.tree.map(lambda g: g / MICRO, total), state, params)

    found, _ = step(PARAMS, tx.init(PARAMS), data)
    assert_step(found, clipped_step(mean_gradient(data)))


def scaled_gradient(data, scale):
    """In float16, of the loss times the scale, as mixed precision has it."""
    low = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    batch = jax.tree.map(lambda x: jnp.float16(x.reshape(-1, *x.shape[2:])), data)
    return jax.grad(lambda p: loss_of(p, batch) * scale.astype(jnp.float16))(low)


def unscaled(grads, scale):
    return jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)


def test_unscale_then_clip(data):
    scale = jnp.float32(256.0)
    tx = clipped_sgd()
    grads = helpers.quick_jit(scaled_gradient)(data, scale)
    update = helpers.quick_jit(tx.update)
    found, state = update(unscaled(grads, scale), tx.init(PARAMS), PARAMS)
    expected = clipped_step(mean_gradient(data))
    chex.assert_trees_all_close(found, expected, rtol=1e-2, atol=1e-3)
    whole = optax.tree.norm(mean_gradient(data))
    np.testing.assert_allclose(optclip.metrics(state)["clip/norm"], whole, rtol=1e-2)
    # Clipped before, the norm would be in units of the scale.
    clip = helpers.quick_jit(optclip.functional.clip_by_global_norm)
    early, _ = clip(grads, MAX_NORM)
    size = optax.tree.norm(unscaled(early, scale))
    np.testing.assert_allclose(size, MAX_NORM / scale, rtol=1e-2)


def test_an_overflow_is_skipped_and_lowers_the_scale(data):
    """The usual rule, half at an overflow, by what `skip` tells of it."""
    tx = optclip.skip(
        optax.chain(optclip.clip_by_global_norm(MAX_NORM), optax.adam(0.1))
    )
    state, params, scale = tx.init(PARAMS), PARAMS, 2.0**13
    scales = []

    @helpers.quick_jit
    def step(state, params, scale):
        grads = unscaled(scaled_gradient(data, scale), scale)
        updates, state = tx.update(grads, state, params)
        off = optclip.metrics(state)["skip/consecutive"] > 0
        return (
            state,
            optax.apply_updates(params, updates),
            jnp.where(off, scale / 2, scale),
        )

    while len(scales) < 8:
        before = params, state.skip_inner
        state, params, new = step(state, params, scale)
        overflowed = new < scale
        if overflowed:
            helpers.assert_identical((params, state.skip_inner), before)
        else:
            assert helpers.differs(params, before[0])
        scales.append(float(new))
        scale = float(new)
    assert scales[0] < 2.0**13
    assert scales[-1] == scales[-2]
    taken = int(state.skip_inner[1][0].count)
    assert taken + int(optclip.metrics(state)["skip/skipped"]) == 8
    assert taken > 0
