"""Minimize with Optimistix, which hashes what the functions of an optimizer hold."""

import jax
import jax.numpy as jnp
import optax
import optimistix as optx
import pytest

import optclip
from tests.integration.stacks import page
from tests.support.registry import ENTRIES, RECIPES

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
