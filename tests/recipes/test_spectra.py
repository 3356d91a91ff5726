"""SPECTRA by hand: what is capped and scaled, in which steps, and what is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes
from tests.support import helpers

WIDE = jnp.zeros((2, 8)).at[0, 0].set(30.0).at[1, 1].set(0.4)
UNCAPPED = {"max_value": float("inf")}


def updated(tx, tree, steps=1):
    """The updates of the last of so many equal steps, and the state."""
    update, state = helpers.quick_jit(tx.update), tx.init(tree)
    for _ in range(steps):
        found, state = update(tree, state)
    return found, state


def test_singular_values_are_softly_capped_at_ten_and_scaled_by_the_shape():
    found, _ = updated(recipes.spectra(optax.identity()), WIDE)
    for i, size in enumerate((30.0, 0.4)):
        capped = 2.0 * size / np.sqrt(1 + (size / 10.0) ** 2)
        np.testing.assert_allclose(found[i, i], capped, rtol=1e-5)
    assert np.sum(np.abs(found) > 1e-5) == 2


@pytest.mark.parametrize(
    ("shape", "options", "factor"),
    [
        ((2, 8), {}, 2.0),
        ((8, 2), {}, 1.0),
        ((8, 2), {"transposed": lambda path: path == "embed"}, 2.0),
        ((2, 8), {"transposed": lambda path: path == "embed"}, 1.0),
        ((2, 8), {"transposed": lambda path: path == "head"}, 2.0),
        ((2, 8), {"matrix_axes": (1, 0)}, 1.0),
        ((2, 5, 8), {"matrix_axes": (0, -1)}, 2.0),
        ((7, 2, 18), {}, 3.0),
        ((1, 4), {}, 2.0),
        ((0, 5), {}, 1.0),
        ((3,), {}, 1.0),
        ((), {}, 1.0),
    ],
)
def test_the_factor_is_the_root_of_outputs_over_inputs(shape, options, factor):
    tx = recipes.spectra(optax.identity(), **UNCAPPED, **options)
    tree = {"embed": jnp.full(shape, 0.5)}
    found, _ = updated(tx, tree)
    np.testing.assert_allclose(found["embed"], factor * tree["embed"], rtol=1e-6)


def test_what_is_masked_or_whole_is_neither_capped_nor_scaled():
    tree = {"a": WIDE, "b": WIDE, "n": jnp.arange(16).reshape(2, 8)}
    mask = optclip.by_path(lambda path: path != "b")
    tx = recipes.spectra(optax.identity(), 1.0, max_gradient=1.0, mask=mask)
    found, _ = updated(tx, tree)
    assert helpers.differs(found["a"], tree["a"])
    for name in ("b", "n"):
        np.testing.assert_array_equal(found[name], tree[name])


def test_gradients_of_matrices_alone_are_capped_before_the_optimizer():
    tree = {"kernel": WIDE, "bias": jnp.array([3.0, 4.0]), "scale": jnp.float32(2.0)}
    tx = recipes.spectra(optax.scale(10.0), **UNCAPPED, max_gradient=0.1)
    found, state = updated(tx, tree)
    sizes = np.array([30.0, 0.4])
    capped = sizes / np.sqrt(1 + (sizes / 0.1) ** 2)
    np.testing.assert_allclose(np.diag(found["kernel"]), 20.0 * capped, rtol=1e-4)
    np.testing.assert_allclose(found["bias"], [30.0, 40.0], rtol=1e-6)
    np.testing.assert_allclose(found["scale"], 20.0, rtol=1e-6)
    metrics = optclip.metrics(state)
    np.testing.assert_allclose(metrics["gradient/threshold"], 0.1, rtol=1e-6)
    assert metrics["clip/threshold"] == np.inf


def test_a_vector_is_capped_by_its_norm_without_a_jump():
    for norm in (0.5, 2.0, 2.1, 30.0):
        tx = recipes.spectra(optax.identity(), 2.0)
        found, _ = updated(tx, jnp.array([0.6, 0.8]) * norm)
        wanted = norm / np.sqrt(1 + (norm / 2.0) ** 2)
        np.testing.assert_allclose(found, np.array([0.6, 0.8]) * wanted, rtol=1e-5)


@pytest.mark.parametrize("limit", [2.0, lambda step: 2.0 + 0.0 * step])
def test_cap_times_learning_rate_stays_in_the_warm_up_and_no_longer(limit):
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.5, 4, 10)
    tx = recipes.spectra(
        optax.identity(), limit, max_gradient=1.0, learning_rate=rate, warmup=4
    )
    update, state = helpers.quick_jit(tx.update), tx.init(WIDE)
    found = []
    for _ in range(8):
        _, state = update(WIDE, state)
        metrics = optclip.metrics(state)
        found.append([metrics[f"{name}/threshold"] for name in ("clip", "gradient")])
    # By no rate, the first cap is what the authors' least rate of 1e-10 makes it.
    factors = np.array([0.5e10, 4.0, 2.0, 4 / 3, 1, 1, 1, 1])
    np.testing.assert_allclose(found, np.outer(factors, [2.0, 1.0]), rtol=1e-5)


def test_it_is_around_adam_if_around_nothing():
    tree = {"kernel": WIDE}
    found, _ = updated(recipes.spectra(max_value=3.0), tree, steps=2)
    chain = optax.chain(
        optax.scale_by_adam(),
        optclip.clip_by_singular_value(3.0, response="soft", method="newton_schulz"),
        optax.scale(2.0),
    )
    wanted, _ = updated(chain, tree, steps=2)
    np.testing.assert_allclose(found["kernel"], wanted["kernel"], rtol=1e-6)


def test_a_sparse_matrix_is_refused():
    from jax.experimental.sparse import BCOO

    tree = {"w": BCOO.fromdense(jnp.eye(3))}
    tx = recipes.spectra(optax.identity(), max_gradient=1.0)
    with pytest.raises(ValueError, match="A leaf must be dense"):
        jax.eval_shape(lambda: tx.update(tree, tx.init(tree)))
