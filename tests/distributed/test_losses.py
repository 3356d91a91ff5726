"""Losses that differ between devices: the largest counts on all of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import optclip
from optclip import thresholds

PARAMS = np.ones(2, np.float32)
MESH = {"mesh": jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))}
BY_DEVICE = {"in_specs": P("data"), "out_specs": P("data"), **MESH}
MODES = {
    "shard_map": lambda run: jax.jit(jax.shard_map(run, **BY_DEVICE)),
    "untyped": lambda run: jax.jit(jax.shard_map(run, check_vma=False, **BY_DEVICE)),
    "pmap": lambda run: (
        lambda losses: jax.tree.map(
            lambda x: x[:, 0], jax.pmap(run, axis_name="data")(losses[:, None])
        )
    ),
}
LIMITS = {"number": 3.0, "rule": thresholds.scaled(thresholds.quantile(0.5, 4), 2.0)}


def run_of(max_loss):
    """Return a run of steps, given the losses of each on one device."""
    tx = optclip.skip(optax.adam(0.1), max_loss=max_loss, axis_name=())
    tx = optclip.with_history(tx, 8)

    def step(state, loss):
        updates, state = tx.update(PARAMS, state, PARAMS, value=loss)
        return state, (updates, optclip.metrics(state))

    def run(losses):
        state, outs = jax.lax.scan(step, tx.init(PARAMS), losses[0])
        (rows,) = state.history_rows.values()
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (rows, outs))

    return run


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("mode", MODES)
def test_skip_unequal_losses_act_as_largest_on_all_devices(mode, limit):
    run = MODES[mode](run_of(LIMITS[limit]))
    alone = jax.jit(run_of(LIMITS[limit]))
    for loss in (np.nan, np.inf, -np.inf, 9.0):
        losses = np.array([1.5, 2.0, 1.0, 2.0], np.float32)[:, None].repeat(6, 1)
        losses[1, 3] = loss
        worst = np.full(6, 2.0, np.float32)
        worst[3] = loss
        expected = alone(worst[None])
        np.testing.assert_array_equal(expected[1][1]["skip/loss"][0], worst)
        np.testing.assert_array_equal(
            expected[1][1]["skip/skipped"][0], [0, 0, 0, 1, 1, 1]
        )
        found = jax.tree.map(np.asarray, run(losses))
        on_all = jax.tree.map(lambda x: np.repeat(x, 4, 0), expected)
        chex.assert_trees_all_equal(found, on_all)


def test_skip_loss_alike_on_all_devices_needs_no_collective():
    def step(tx):
        return lambda x, loss: tx.update(x, tx.init(x), value=loss)[0]

    def collectives(**limit):
        update = step(optclip.with_history(optclip.skip(optax.sgd(1.0), **limit), 2))
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), **MESH}
        text = jax.jit(jax.shard_map(update, **specs)).lower(jnp.ones(4), 1.0).as_text()
        return text.count("all_reduce")

    assert collectives(max_loss=3.0) == collectives() > 0


def test_skip_unequal_losses_permit_derivatives():
    def updated(scale, loss):
        tx = optclip.skip(optax.sgd(1.0), max_loss=3.0)
        return tx.update(scale, tx.init(scale), value=scale * loss[0])[0]

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), **MESH}
    step = jax.jit(jax.shard_map(jax.grad(updated), **specs))
    assert step(1.0, np.array([1, 2, 3, 1.0], np.float32)) == -1
    assert step(1.0, np.array([1, 2, 4, 1.0], np.float32)) == 0


@pytest.mark.parametrize("mode", MODES)
def test_skip_losses_of_vmapped_runs_stay_apart(mode):
    runs = jax.vmap(run_of(3.0), in_axes=1, out_axes=1, axis_name="run")
    losses = np.array([[2, 9, 9], [2, 2, 9], [2, 2, 2], [2, 2, 2]], np.float32)
    metrics = MODES[mode](runs)(losses[..., None])[1][1]
    np.testing.assert_array_equal(metrics["skip/skipped"][..., 0], [[0, 1, 1]] * 4)
