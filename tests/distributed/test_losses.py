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


def runs_of(max_loss):
    """Return runs of steps, given the losses of each on one device."""
    tx = optclip.skip(optax.adam(0.1), max_loss=max_loss, axis_name=())
    tx = optclip.with_history(tx, 8)

    def step(state, loss):
        updates, state = tx.update(PARAMS, state, PARAMS, value=loss)
        return state, (updates, optclip.metrics(state))

    def run(losses):
        state, outs = jax.lax.scan(step, tx.init(PARAMS), losses)
        return state.history_rows, outs

    return jax.vmap(run, axis_name="run")


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("mode", MODES)
def test_skip_unequal_losses_act_as_largest_on_all_devices(mode, limit):
    """Those of vmapped runs stay apart, in metrics, histories and learned limits."""
    runs, spikes = runs_of(LIMITS[limit]), [np.nan, np.inf, -np.inf, 9.0, 2.0]
    worst = np.full((5, 6), 2.0, np.float32)
    worst[:, 3] = spikes
    expected = jax.jit(runs)(worst)
    metrics = expected[1][1]
    np.testing.assert_array_equal(metrics["skip/loss"], worst)
    np.testing.assert_array_equal(metrics["skip/skipped"][:, -1], [1, 1, 1, 1, 0])
    losses = np.stack([np.full_like(worst, x) for x in (1.0, 1.5, 2.0, -3.0)])
    losses[1, :, 3] = spikes
    found = MODES[mode](
        lambda x: jax.tree.map(lambda x: jnp.asarray(x)[None], runs(x[0]))
    )(losses)
    on_all = jax.tree.map(lambda x: np.stack([x] * 4), expected)
    chex.assert_trees_all_equal(jax.device_get(found), on_all)


def test_skip_loss_alike_on_all_devices_needs_no_collective():
    tx = optclip.with_history(optclip.skip(optax.sgd(1.0), max_loss=3.0), 2)
    step = jax.shard_map(
        lambda x, loss: tx.update(x, tx.init(x), value=loss)[0],
        in_specs=P(),
        out_specs=P(),
        **MESH,
    )
    assert "all_reduce" not in jax.jit(step).lower(1.0, 1.0).as_text()


def test_skip_unequal_losses_permit_derivatives():
    def updated(scale, loss):
        tx = optclip.skip(optax.sgd(1.0), max_loss=3.0)
        return tx.update(scale, tx.init(scale), value=scale * loss[0])[0]

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), **MESH}
    step = jax.jit(jax.shard_map(jax.grad(updated), **specs))
    assert step(1.0, np.array([1, 2, 3, 1.0], np.float32)) == -1
    assert step(1.0, np.array([1, 2, 4, 1.0], np.float32)) == 0
