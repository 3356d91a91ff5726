"""Optimizers that are not in optax proper: contributed and private."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.integration.stacks import by_hand, page

# jax_privacy 2.0.0 takes the norm of an example by a name that optax has replaced.
pytestmark = pytest.mark.filterwarnings(
    "ignore:optax.global_norm is deprecated:DeprecationWarning"
)

CONTRIB = "Optimizers of `optax.contrib`"
PRIVATE = "Private training with `jax_privacy`"


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
    # Also where it is evaluated, which for schedule_free is not where it steps.
    loss = contrib["loss_of"](params, contrib["x"], contrib["y"])
    assert loss < losses[0] / 4


@pytest.mark.parametrize("name", ["muon", "free"])
def test_a_clip_in_front_is_the_clip_by_hand(contrib, name):
    """Three steps: the same optimizer without a clip, fed what NumPy clipped."""
    plain = {
        "muon": optax.contrib.muon(0.03),
        "free": optax.contrib.schedule_free_adamw(0.03, warmup_steps=5),
    }[name]
    clipped, params = contrib[name], contrib["start"]
    ours, theirs = clipped.init(params), plain.init(params)
    structure = jax.tree.structure(params)
    for i in range(3):
        grads = jax.grad(contrib["loss_of"])(params, contrib["x"], (i + 2) * 5.0)
        assert by_hand.norm(grads) > 2
        small = [jnp.asarray(g, jnp.float32) for g in by_hand.clip(grads, 1.0)]
        small = jax.tree.unflatten(structure, small)
        updates, ours = clipped.update(grads, ours, params)
        expected, theirs = plain.update(small, theirs, params)
        for u, e in zip(by_hand.wide(updates), by_hand.wide(expected), strict=True):
            np.testing.assert_allclose(u, e, rtol=1e-3, atol=1e-6)
        params = optax.apply_updates(params, updates)


def test_muon_hides_the_first_clip_from_matrices(contrib):
    """What the page says of Muon, and that later steps do feel it."""
    plain, clipped = optax.contrib.muon(0.03), contrib["muon"]
    params = {"kernel": contrib["start"]["in"]}
    ours, theirs = clipped.init(params), plain.init(params)
    differences = []
    for size in (40.0, 1.0):
        grads = {"kernel": size * jnp.cos(jnp.arange(128.0).reshape(8, 16) * size)}
        u, ours = clipped.update(grads, ours, params)
        e, theirs = plain.update(grads, theirs, params)
        differences.append(float(jnp.abs(u["kernel"] - e["kernel"]).max()))
    assert optclip.metrics(ours)["clip/rate"] == 1
    assert differences[0] < 1e-5
    assert differences[1] > 1e-3


def test_multi_steps_clips_the_mean(contrib):
    tx, params = contrib["fourth"], contrib["start"]
    state, micro = tx.init(params), []
    for i in range(4):
        grads = jax.grad(contrib["loss_of"])(params, contrib["x"], (i + 1) * 10.0)
        micro.append(by_hand.wide(grads))
        _, state = tx.update(grads, state, params)
    mean = [np.mean(leaves, axis=0) for leaves in zip(*micro, strict=True)]
    logged = optclip.metrics(state)
    assert logged["clip/rate"] == 1
    np.testing.assert_allclose(logged["clip/norm"], by_hand.norm(mean), rtol=1e-5)


def test_private_training(private):
    by_hand.check_trained(private["losses"], private["opt_state"])


def test_private_gradients_by_hand(private):
    """Each example's gradient, its entries clipped by ours and its norm by theirs."""
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
    found = by_hand.wide(private["grad_of"](params, x, y))
    np.testing.assert_allclose(np.concatenate([f.ravel() for f in found]), total, 1e-4)


def test_private_noise_comes_before_our_clip(private):
    """The first step is SGD on the noised gradient, clipped."""
    tx, params = private["tx"], private["start"]
    noise = private["noise_addition"].gaussian_privatizer(stddev=0.05, prng_key=0)
    grads = private["grad_of"](params, private["x"], 5 * private["y"])
    noised, _ = noise.update(grads, noise.init(params))
    assert by_hand.norm(noised) > 0.5
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = [-0.1 * leaf for leaf in by_hand.clip(noised, 0.5)]
    for u, e in zip(by_hand.wide(updates), expected, strict=True):
        np.testing.assert_allclose(u, e, rtol=1e-4, atol=1e-7)
