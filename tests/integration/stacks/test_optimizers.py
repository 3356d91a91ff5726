"""Train with optimizers of optax, contributed and private, and with Optimistix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import optclip
from tests.integration.stacks import by_hand, page
from tests.support.registry import ENTRIES, RECIPES

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


# Optimistix minimizes, and hashes what the functions of an optimizer hold.

EVERY = {entry.id: entry.make for entry in ENTRIES} | RECIPES


def minimize(tx, params, max_steps):
    def loss_of(params, _):
        return sum(jnp.sum(leaf**2) / 2 for leaf in jax.tree.leaves(params))

    solver = optx.OptaxMinimiser(tx, rtol=0.0, atol=1e-9)
    return optx.minimise(loss_of, solver, params, max_steps=max_steps, throw=False)


def test_optimistix_block_minimizes():
    names = page.run("Optimistix")
    assert names["last"] < names["first"] / 2
    assert 0 < names["rate"] < 1


@pytest.mark.parametrize("name", EVERY)
def test_optimistix_traces_every_transformation(name):
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    solution = jax.eval_shape(lambda: minimize(EVERY[name](), params, 2).value)
    assert jax.tree.structure(solution) == jax.tree.structure(params)


def test_two_skipped_steps_end_minimization():
    """If this fails, the warning on the page no longer holds."""
    tx = optclip.skip(optax.sgd(0.1), max_norm=1.0)
    solution = minimize(tx, {"a": jnp.array([2.0, -1.0])}, 9)
    assert solution.stats["num_steps"] == 2
    assert solution.result == optx.RESULTS.successful
