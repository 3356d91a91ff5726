"""The page's private loop, beside NumPy, jax_privacy and optax's aggregators."""

import functools

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest
from optax.experimental import aggregating

from optclip import per_example
from tests.integration.stacks import by_hand, page

# jax_privacy 2.0.0 takes the norm of an example by a name that optax has replaced.
pytestmark = pytest.mark.filterwarnings(
    "ignore:optax.global_norm is deprecated:DeprecationWarning"
)

PRIVATE = "Private training"
OF_NNX = "Private training of a Flax NNX model"
C = 1e-3


@pytest.fixture(scope="module")
def private():
    return page.run(PRIVATE)


def test_the_loop_trains_within_its_budget(private):
    loss = private["loss_of"](private["params"], private["x"], private["y"])
    assert loss < private["first"] / 3
    assert 1 < private["epsilon"] < 8


def test_a_model_of_nnx_trains_too():
    found = page.run(OF_NNX)
    model, x, y = found["model"], found["x"], found["y"]
    assert jnp.mean((model(x) - y) ** 2) < found["first"] / 3


def test_the_sum_is_that_of_clipped_examples(private):
    x, y, params = private["x"][:40], private["y"][:40], private["start"]
    total, norms = 0.0, []
    for i in range(len(x)):
        leaves = by_hand.wide(jax.grad(private["loss_of"])(params, x[i], y[i]))
        norms.append(by_hand.norm(leaves))
        flat = np.concatenate([leaf.ravel() for leaf in by_hand.clip(leaves, 1.0)])
        total = total + flat / private["expected"]
    assert 0 < np.mean(np.array(norms) > 1) < 1
    found, _ = private["grad_of"](params, x, y)
    found = np.concatenate([leaf.ravel() for leaf in by_hand.wide(found)])
    np.testing.assert_allclose(found, total, rtol=3e-4, atol=1e-6)


@functools.cache
def gradients(kind):
    """Gradients of one example each, on which jax_privacy 2.0.0 breaks its bound."""
    rng = np.random.default_rng(0)
    return {
        "fp16": jnp.full((1, 4096), 1e-4, jnp.float16),
        "tiny": jnp.full((1, 4), 1e-25, jnp.float32),
        "normal": jnp.asarray(rng.normal(size=(1000, 64)), jnp.float32),
    }[kind]


def lengths(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


@pytest.mark.parametrize(
    ("kind", "threshold"), [("fp16", C), ("tiny", 1e-26), ("normal", 1.0)]
)
def test_no_example_is_above_the_threshold_where_one_of_theirs_is(kind, threshold):
    grads = gradients(kind)

    def loss(w, x):
        return jnp.sum(w.astype(x.dtype) * x)

    w = jnp.zeros(grads.shape[1:], grads.dtype)
    ours = per_example.clipped_grad(loss, threshold, reduce="none")
    found = lengths(ours(w, grads)[0])
    assert (found <= np.float32(threshold)).all()
    theirs = jax_privacy.clipped_grad(
        loss, l2_clip_norm=threshold, keep_batch_dim=False, batch_argnums=1
    )
    alone = [lengths(theirs(w, grads[i : i + 1])) for i in range(min(len(grads), 50))]
    assert max(alone) > threshold


def test_on_ordinary_gradients_it_is_their_sum(private):
    x, y, params = private["x"], private["y"], private["start"]
    ours = per_example.clipped_grad(
        private["loss_of"], 1.0, batch_argnums=(1, 2), microbatch_size=4, strict=False
    )
    theirs = jax_privacy.clipped_grad(
        private["loss_of"], l2_clip_norm=1.0, batch_argnums=(1, 2),
        keep_batch_dim=False, microbatch_size=4,
    )  # fmt: skip
    found, _ = ours(params, x, y)
    wanted = theirs(params, x, y)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 2e-6, 2e-5), found, wanted
    )
    assert ours.sensitivity() == theirs.sensitivity()


def test_their_noise_is_proportional_to_our_sensitivity(private):
    grads, _ = private["grad_of"](private["start"], private["x"], private["y"])
    updates, _ = private["tx"].update(
        grads, private["tx"].init(private["start"]), private["start"]
    )
    noise = jax.tree.map(lambda u, g: -u / 0.3 - g, updates, grads)
    spread = np.std(np.concatenate([n.ravel() for n in by_hand.wide(noise)]))
    assert 0.3 < spread / private["grad_of"].sensitivity() < 2


def test_it_is_an_aggregator_of_optax(private):
    x, y, params = private["x"][:32], private["y"][:32], private["start"]
    each = jax.vmap(jax.grad(private["loss_of"]), (None, 0, 0))(params, x, y)
    clip = per_example.aggregate(1.0, normalize_by=32)
    tx = aggregating.process(optax.identity(), clip, optax.sgd(0.1))
    updates, _ = tx.update(each, tx.init(params), params)
    f = per_example.clipped_grad(
        private["loss_of"], 1.0, batch_argnums=(1, 2), normalize_by=32
    )
    wanted, _ = f(params, x, y)
    jax.tree.map(
        lambda u, g: np.testing.assert_allclose(u, -0.1 * g, 1e-5), updates, wanted
    )
