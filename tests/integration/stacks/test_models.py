"""Train small models of each library, and compare one step with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.integration.stacks import by_hand, page

# These targets have gradients far above the threshold, also after training.
LARGE = 30.0
WATCH = optax.chain(optclip.clip_by_norm(1.0, record="leaves"), optax.sgd(0.1))


def assert_metrics_have_path(stack, state):
    """Check that the record of leaves has the path in the table of the page."""
    (row,) = [row for row in page.rows("library") if row[0] == stack]
    path = row[-1].split("`")[1]
    assert f"clip/norm/{path}" in optclip.metrics(state)


def trained(names, *state):
    """Repeat the step of a block, and check that it trains and clips some steps."""
    losses = []
    for _ in range(60):
        *state, loss, _ = names["step"](*state, names["x"], names["y"])
        losses.append(loss)
    by_hand.check_trained(losses, getattr(state[-1], "opt_state", state[-1]))
    return state


def check(stack, params, after, grads, rate=0.1):
    assert_metrics_have_path(stack, WATCH.init(params))
    by_hand.check_sgd_step(params, after, grads, rate)


def data(stack):
    names = page.names(stack)
    return names["x"], LARGE * names["y"]


def test_flax_linen_step_matches_numpy():
    names = page.names("Flax Linen")
    (state,), batch = trained(names, names["state"]), data("Flax Linen")
    grads = jax.grad(names["loss_of"])(state.params, *batch)
    after, _, _ = names["step"](state, *batch)
    check("Flax Linen", state.params, after.params, grads)


def test_equinox_step_matches_numpy():
    names = page.names("Equinox")
    eqx = names["eqx"]
    model, opt_state = trained(names, names["model"], names["opt_state"])
    grads = eqx.filter_grad(names["loss_of"])(model, *data("Equinox"))
    after, *_ = names["step"](model, opt_state, *data("Equinox"))
    before, after = (eqx.filter(m, eqx.is_inexact_array) for m in (model, after))
    check("Equinox", before, after, grads)


def test_haiku_step_matches_numpy():
    names = page.names("Haiku")
    params, opt_state = trained(names, names["params"], names["opt_state"])
    grads = jax.grad(names["loss_of"])(params, *data("Haiku"))
    after, *_ = names["step"](params, opt_state, *data("Haiku"))
    check("Haiku", params, after, grads)


def test_keras_step_matches_numpy():
    stack = "Keras 3 on JAX"
    names = page.names(stack)
    assert names["keras"].backend.backend() == "jax"
    state = (names[name] for name in ("params", "others", "opt_state"))
    params, others, opt_state = trained(names, *state)
    x, y = data(stack)
    grads, _ = jax.grad(names["loss_of"], has_aux=True)(params, others, x, y)
    after, *_ = names["step"](params, others, opt_state, x, y)
    check(stack, params, after, grads, rate=0.05)
    # The model has the parameters again, with the statistics of its batch norm.
    loss, _ = names["loss_of"](names["params"], names["others"], x, names["y"])
    predicted = names["model"](x, training=True)
    assert np.isclose(loss, jnp.mean((predicted - names["y"]) ** 2), rtol=1e-5)


def test_flax_nnx_step_matches_numpy():
    # Steps change the model in place.
    names = page.run("Flax NNX")
    nnx, model, optimizer = names["nnx"], names["model"], names["optimizer"]
    by_hand.check_trained(names["losses"], nnx.as_pure(optimizer.opt_state))
    state = nnx.Optimizer(model, WATCH, wrt=nnx.Param).opt_state
    for each in (state, nnx.as_pure(state)):
        assert_metrics_have_path("Flax NNX", each)
    x, y = names["x"], LARGE * names["y"]
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    grads = nnx.grad(names["loss_of"])(model, x, y)
    _, logged = names["step"](model, optimizer, x, y)
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    by_hand.check_sgd_step(before, after, nnx.as_pure(grads), 0.1)
    np.testing.assert_allclose(logged["clip/norm"], by_hand.norm(grads), rtol=1e-5)


@pytest.mark.parametrize("differentiated", ["Param", "LoRAParam"])
def test_nnx_adapter_norm_excludes_frozen_weights(differentiated):
    nnx = page.names("Flax NNX")["nnx"]
    rngs, x, y = nnx.Rngs(0), jnp.ones((3, 4)), LARGE
    model = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
    tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    which = nnx.DiffState(0, getattr(nnx, differentiated))
    grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2), argnums=which)(model)
    before, frozen = nnx.as_pure(nnx.state(model, nnx.LoRAParam, ...))
    optimizer.update(model, grads)
    after, kept = nnx.as_pure(nnx.state(model, nnx.LoRAParam, ...))
    adapter = nnx.as_pure(nnx.filter_state(grads, nnx.LoRAParam))
    by_hand.check_sgd_step(before, after, adapter, 0.1)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, frozen, kept))


def test_flax_linen_block_skips_bad_step():
    """The block prints that it skipped one step."""
    names = page.run("Flax Linen and the loss", page.run("Flax Linen"))
    assert names["state"].step == 20


def test_unfiltered_equinox_model_raises():
    model = page.names("Equinox")["model"]
    clip = optclip.clip_by_global_norm(1.0)
    with pytest.raises(TypeError, match="'activation'.*equinox.filter"):
        clip.update(model, clip.init(model))
