"""Small trainings in every library of models, and one step of each by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.integration.stacks import by_hand, page

# Gradients of these are far beyond the threshold, also where the model has converged.
LARGE = 30.0

WATCH = optax.chain(optclip.clip_by_norm(1.0, record="leaves"), optax.sgd(0.1))


def check_path(stack, state):
    """The table's path of a leaf is one that the record has."""
    (row,) = [row for row in page.rows("stack") if row[0] == stack]
    path = row[-1].split("`")[1]
    assert f"clip/norm/{path}" in optclip.metrics(state)


def test_flax_nnx():
    names = page.run("Flax NNX")
    nnx, model, optimizer = names["nnx"], names["model"], names["optimizer"]
    by_hand.check_trained(names["losses"], nnx.as_pure(optimizer.opt_state))
    x, y = names["x"], LARGE * names["y"]
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    grads = nnx.grad(names["loss_of"])(model, x, y)
    _, logged = names["step"](model, optimizer, x, y)
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    by_hand.check_sgd_step(before, after, nnx.as_pure(grads), 0.1)
    np.testing.assert_allclose(logged["clip/norm"], by_hand.norm(grads), rtol=1e-5)


def test_flax_nnx_paths_are_those_of_the_pure_state():
    names = page.run("Flax NNX")
    nnx = names["nnx"]
    state = nnx.Optimizer(names["model"], WATCH, wrt=nnx.Param).opt_state
    check_path("Flax NNX", state)
    check_path("Flax NNX", nnx.as_pure(state))


def test_flax_nnx_passes_the_loss_on():
    names = page.run("Flax NNX")
    nnx, model = names["nnx"], names["model"]
    grads = nnx.grad(names["loss_of"])(model, names["x"], names["y"])
    tx = optclip.skip(optax.sgd(0.1), max_value=10.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for loss in (1.0, 100.0):
        optimizer.update(model, grads, value=jnp.float32(loss))
    seen = optclip.metrics(optimizer.opt_state)
    assert seen["skip/value"] == 100
    assert seen["skip/skipped"] == 1


def test_flax_linen_and_the_loss():
    """The page prints that the bad step was left out, and no other."""
    names = page.run("Flax Linen and the loss")
    assert names["step"]


def test_flax_linen():
    names = page.run("Flax Linen")
    state = names["state"]
    by_hand.check_trained(names["losses"], state.opt_state)
    check_path("Flax Linen", WATCH.init(state.params))
    x, y = names["x"], LARGE * names["y"]
    grads = jax.grad(names["loss_of"])(state.params, x, y)
    after, _, _ = names["step"](state, x, y)
    by_hand.check_sgd_step(state.params, after.params, grads, 0.1)


def test_equinox():
    names = page.run("Equinox")
    eqx, model, opt_state = names["eqx"], names["model"], names["opt_state"]
    by_hand.check_trained(names["losses"], opt_state)
    check_path("Equinox", WATCH.init(eqx.filter(model, eqx.is_inexact_array)))
    x, y = names["x"], LARGE * names["y"]
    grads = eqx.filter_grad(names["loss_of"])(model, x, y)
    after, *_ = names["step"](model, opt_state, x, y)
    before, after = (eqx.filter(m, eqx.is_inexact_array) for m in (model, after))
    by_hand.check_sgd_step(before, after, grads, 0.1)


def test_an_equinox_model_that_is_not_filtered_is_refused_by_name():
    model = page.run("Equinox")["model"]
    clip = optclip.clip_by_global_norm(1.0)
    with pytest.raises(TypeError, match="'activation'.*equinox.filter"):
        clip.update(model, clip.init(model))


def test_haiku():
    names = page.run("Haiku")
    params, opt_state = names["params"], names["opt_state"]
    by_hand.check_trained(names["losses"], opt_state)
    check_path("Haiku", WATCH.init(params))
    x, y = names["x"], LARGE * names["y"]
    grads = jax.grad(names["loss_of"])(params, x, y)
    after, *_ = names["step"](params, opt_state, x, y)
    by_hand.check_sgd_step(params, after, grads, 0.1)


def test_keras():
    names = page.run("Keras 3 on JAX")
    assert names["keras"].backend.backend() == "jax"
    params, others, opt_state = (names[n] for n in ("params", "others", "opt_state"))
    by_hand.check_trained(names["losses"], opt_state)
    check_path("Keras 3 on JAX", WATCH.init(params))
    x, y = names["x"], LARGE * names["y"]
    grads, _ = jax.grad(names["loss_of"], has_aux=True)(params, others, x, y)
    after, *_ = names["step"](params, others, opt_state, x, y)
    by_hand.check_sgd_step(params, after, grads, 0.05)
    # Back in the model, with the statistics of its batch norm.
    loss, _ = names["loss_of"](params, others, x, names["y"])
    predicted = names["model"](x, training=True)
    assert np.isclose(loss, jnp.mean((predicted - names["y"]) ** 2), rtol=1e-5)


def test_keras_by_name():
    """The names that the page proposes for thresholds by layer."""
    model = page.run("Keras 3 on JAX")["model"]
    params = {v.path: v.value for v in model.trainable_variables}
    is_bias = optclip.by_path(lambda path: "bias" if "bias" in path else "rest")
    tx = optclip.clip_by_group_norm({"bias": 1.0, "rest": 2.0}, is_bias)
    _, state = tx.update(params, tx.init(params))
    biases = [value for path, value in params.items() if "bias" in path]
    assert len(biases) == 2
    found = optclip.metrics(state)["clip/norm/bias"]
    np.testing.assert_allclose(found, by_hand.norm(biases), rtol=1e-5, atol=1e-30)
    listed = [params[v.path] for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    predicted, _ = model.stateless_call(listed, others, jnp.ones((2, 8)))
    np.testing.assert_allclose(predicted, model(jnp.ones((2, 8))), rtol=1e-6)


def test_compile_of_keras_takes_no_transformation():
    """The page says so; when this fails, the page can be shorter."""
    model = page.run("Keras 3 on JAX")["model"]
    with pytest.raises(ValueError, match="Could not interpret optimizer"):
        model.compile(optimizer=optax.sgd(0.1))
