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

CONTRIB = "Optimizers of `optax.contrib`"
PRIVATE = "Clipping by `jax_privacy`"


X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X).sum(axis=1, keepdims=True)


def loss_of(params):
    hidden = jax.nn.relu(X @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - Y) ** 2)


@pytest.fixture(scope="module")
def contrib():
    return page.run(CONTRIB)


@pytest.fixture(scope="module")
def private():
    return page.run(PRIVATE)


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


def test_private_training_converges(private):
    by_hand.check_trained(private["losses"], private["opt_state"])


def test_private_gradient_clips_entries_then_norms(private):
    """Entries are clipped by optclip, norms by jax_privacy."""
    x, y, params = private["x"], 5 * private["y"], private["start"]
    grad = jax.grad(private["loss_of"])
    total, norms = 0.0, []
    for i in range(len(x)):
        leaves = by_hand.wide(grad(params, x[i : i + 1], y[i : i + 1]))
        leaves = [np.clip(leaf, -1, 1) for leaf in leaves]
        norms.append(by_hand.norm(leaves))
        flat = np.concatenate([leaf.ravel() for leaf in by_hand.clip(leaves, 2.0)])
        total = total + flat / len(x)
    assert 0 < np.mean(np.array(norms) > 2) < 1
    leaves = by_hand.wide(private["grad_of"](params, x, y))
    gradient = np.concatenate([leaf.ravel() for leaf in leaves])
    np.testing.assert_allclose(gradient, total, 1e-4)
