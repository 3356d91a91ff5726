"""Train with contributed and private optimizers of optax."""

import jax
import numpy as np
import pytest

from tests.integration.stacks import by_hand, page

# jax_privacy 2.0.0 uses a deprecated name of optax.
pytestmark = pytest.mark.filterwarnings(
    "ignore:optax.global_norm is deprecated:DeprecationWarning"
)

CONTRIB = "Optimizers of `optax.contrib`"
PRIVATE = "Clipping by `jax_privacy`"


@pytest.fixture(scope="module")
def contrib():
    return page.run(CONTRIB)


@pytest.fixture(scope="module")
def private():
    return page.run(PRIVATE)


@pytest.mark.parametrize("name", ["muon", "free", "fourth"])
def test_contributed_optimizers_train(contrib, name):
    params, opt_state, losses = contrib["runs"][name]
    by_hand.check_trained(losses, opt_state)
    # schedule_free evaluates at other parameters than those that it updates.
    loss = contrib["loss_of"](params, contrib["x"], contrib["y"])
    assert loss < losses[0] / 4


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
