"""Minimize with Optimistix, which hashes what the functions of an optimizer hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import optclip
from optclip import thresholds
from tests.integration.stacks import by_hand, page
from tests.support.registry import ENTRIES, RECIPES

EVERY = {entry.id: entry.make for entry in ENTRIES} | RECIPES
# The parameters are their own gradient, whose norm falls from 3.
START = {"a": jnp.array([2.0, -1.0]), "b": jnp.array([2.0])}
NUM_STEPS, RATE = 6, 0.1
# Each transformation and its result for the gradients [a, b], by hand.
CASES = {
    "fixed": (
        optclip.clip_by_global_norm(1.0),
        lambda grads, step: by_hand.clip(grads, 1.0),
    ),
    "rule": (
        # Half the first norm, which is not clipped.
        optclip.clip_by_global_norm(thresholds.ema(0.5, decay=1.0, warmup=0)),
        lambda grads, step: by_hand.clip(grads, 1.5 if step else 3.0),
    ),
    "mask": (
        optclip.clip_by_global_norm(1.0, mask={"a": True, "b": False}),
        lambda grads, step: [*by_hand.clip(grads[:1], 1.0), grads[1]],
    ),
    "groups": (
        optclip.clip_by_group_norm({"x": 1.0, "y": 0.5}, {"a": "x", "b": "y"}),
        lambda grads, step: by_hand.clip(grads[:1], 1.0) + by_hand.clip(grads[1:], 0.5),
    ),
    "skip": (
        optclip.skip(
            optclip.clip_by_global_norm(1.0),
            max_norm=lambda step: jnp.where(step == 2, 0.0, jnp.inf),
        ),
        lambda grads, step: by_hand.clip(grads, 0.0 if step == 2 else 1.0),
    ),
}


def minimize(tx, params, max_steps):
    def loss_of(params, _):
        return sum(jnp.sum(leaf**2) / 2 for leaf in jax.tree.leaves(params))

    solver = optx.OptaxMinimiser(tx, rtol=0.0, atol=1e-9)
    return optx.minimise(loss_of, solver, params, max_steps=max_steps, throw=False)


def test_optimistix_block_minimizes():
    names = page.run("Optimistix")
    assert names["last"] < names["first"] / 2
    assert 0 < names["rate"] < 1


@pytest.mark.parametrize("name", CASES)
def test_optimistix_minimizes_with_clipped_gradients(name):
    tx, clip = CASES[name]
    solution = minimize(optax.chain(tx, optax.sgd(RATE)), START, NUM_STEPS)
    expected = by_hand.wide(START)
    for step in range(NUM_STEPS):
        pairs = zip(expected, clip(expected, step), strict=True)
        expected = [leaf - RATE * clipped for leaf, clipped in pairs]
    for leaf, by_numpy in zip(by_hand.wide(solution.value), expected, strict=True):
        np.testing.assert_allclose(leaf, by_numpy, rtol=1e-5)
    logged = optclip.metrics(solution.state)
    assert all(n > 0 for key, n in logged.items() if key.startswith("clip/clipped"))
    assert logged.get("skip/skipped", 0) == (name == "skip")


@pytest.mark.parametrize("name", EVERY)
def test_optimistix_traces_every_transformation(name):
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    solution = jax.eval_shape(lambda: minimize(EVERY[name](), params, 2).value)
    assert jax.tree.structure(solution) == jax.tree.structure(params)


def test_two_skipped_steps_end_minimization():
    """If this fails, the warning on the page no longer holds."""
    solution = minimize(optclip.skip(optax.sgd(RATE), max_norm=1.0), START, 9)
    assert solution.stats["num_steps"] == 2
    assert solution.result == optx.RESULTS.successful
