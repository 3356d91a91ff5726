"""Train with contributed and private optimizers of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.integration.stacks import by_hand, page

# jax_privacy 2.0.0 uses a deprecated name of optax.
pytestmark = pytest.mark.filterwarnings(
    "ignore:optax.global_norm is deprecated:DeprecationWarning"
)

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X).sum(axis=1, keepdims=True)


def loss_of(params):
    hidden = jax.nn.relu(X @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - Y) ** 2)


@pytest.fixture(scope="module")
def contrib():
    return page.run("Optimizers of `optax.contrib`")


@pytest.mark.parametrize("name", ["muon", "free", "fourth"])
def test_contributed_optimizers_train(contrib, name):
    tx, rng = contrib[name], np.random.default_rng(1)
    params = {
        "in": rng.normal(size=(8, 16)).astype(np.float32) / 3,
        "bias": np.zeros(16, np.float32),
        "out": rng.normal(size=(16, 1)).astype(np.float32) / 4,
    }

    def step(carry, _):
        loss, grads = jax.value_and_grad(loss_of)(carry[0])
        updates, opt_state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), opt_state), loss

    start, num_steps = (params, tx.init(params)), 240 if name == "fourth" else 60
    (params, opt_state), losses = jax.lax.scan(step, start, length=num_steps)
    by_hand.check_trained(losses, opt_state)
    if name == "free":
        params = contrib["average_of"](opt_state, params)
    assert loss_of(params) < losses[0] / 4


def test_private_training_converges():
    private = page.run("Clipping by `jax_privacy`")
    by_hand.check_trained(private["losses"], private["opt_state"])
